// Proof, after the fact, that bytes read in arbitrary stretches were the right
// ones: CRCs of stretches combine to those of what holds them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/open/open_files.h"
#include "format/ours/catalog.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// What says the digests of stored bytes.
enum class DigestKind : uint8_t {
  kNone,
  kSegments,  // a manifest: CRC-32C of every segment
  kArchives,  // archives of torch.save: CRC-32 of every storage
};

// Those of files, where what is read of them is to be verified.
DigestKind DigestsOf(const FileSet& files, bool verify);

// The same of who compares segments by himself.
DigestKind ArchivesOf(const FileSet& files, bool verify);

// What becomes of a storage that was not read as a whole, once.
enum class Untiled : uint8_t { kReadAgain, kPassedOver };

class InputDigests {
 public:
  InputDigests(int workers, DigestKind kind)
      : kind_(kind), workers_(static_cast<size_t>(workers)) {}

  DigestKind kind() const { return kind_; }

  // Bytes [offset, offset + size) of a file were read as `data`. Each worker
  // calls with its own number, so no lock is taken.
  void Add(int worker, uint32_t file, uint64_t offset, const std::byte* data,
           uint64_t size);
  // The same of bytes that are known by their CRC: of kSegments in one segment
  // by their CRC-32C, of kArchives by their CRC-32.
  void Add(int worker, uint32_t file, uint64_t offset, uint32_t crc,
           uint64_t size);
  // Bytes of [lo, hi) were used, but not in a form that Add can digest.
  void Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi);
  // Of kArchives: storages, with their CRC-32s, that bytes which are added from
  // now on may be in. What is in none is not digested.
  void Expect(int worker, std::span<const DigestedRange> storages);

  // Compares every segment that was touched, or every storage that was expected
  // and touched. Of a segment whose digests do not tile it (a header before the
  // first tensor, a stretch that was read twice or on another rank) what they
  // leave out is read, or all of it; a storage is read again, only with
  // kReadAgain. kCorrupt names the file; kCancelled where `job` was.
  Status Check(OpenFiles* files, Untiled untiled, Job* job);

 private:
  struct Digest {
    uint32_t file;
    uint32_t crc;
    uint64_t offset, size;
  };
  using Digests = std::vector<Digest>;
  struct Worker {
    Digests digests;
    std::vector<DigestedRange> expected;
  };

  Status CheckSegments(OpenFiles* files, Job* job);
  Status CheckStorages(OpenFiles* files, Untiled untiled, Job* job);
  // Of all workers, by file and offset; they are gone there then.
  Digests SortedDigests();
  std::vector<DigestedRange> SortedStorages();
  // The digests in [begin, end) of a file, from position `first` on in sorted
  // ones, as one; nullopt where they do not tile it.
  std::optional<uint32_t> Joined(const Digests& sorted, size_t first,
                                 uint32_t file, uint64_t begin,
                                 uint64_t end) const;

  const DigestKind kind_;
  std::vector<Worker> workers_;
};

}  // namespace torch_ckpt
