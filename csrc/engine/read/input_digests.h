// Proof, after the fact, that bytes read in arbitrary stretches were the right
// ones: CRCs of stretches combine to those of what holds them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/open/open_files.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// What says the digests of stored bytes.
enum class DigestKind : uint8_t {
  kNone,
  kSegments,  // a manifest: CRC-32C of every segment
  kArchives,  // archives of torch.save: CRC-32 of every entry
};

class InputDigests {
 public:
  InputDigests(int workers, DigestKind kind)
      : kind_(kind), digests_(static_cast<size_t>(workers)) {}

  DigestKind kind() const { return kind_; }

  // Bytes [offset, offset + size) of a file were read as `data`. Each worker
  // calls with its own number, so no lock is taken.
  void Add(int worker, uint32_t file, uint64_t offset, const std::byte* data,
           uint64_t size);
  // The same of bytes in one segment that are known by their CRC-32C. REQUIRES:
  // kSegments.
  void Add(int worker, uint32_t file, uint64_t offset, uint32_t crc32c,
           uint64_t size);
  // Bytes of [lo, hi) were used, but not in a form that Add can digest.
  void Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi);

  // Compares every segment that was touched. One whose digests do not tile it
  // exactly (a stretch was read twice, left out, or on another rank) is read
  // again. kCorrupt names the file; kCancelled where `job` was. REQUIRES:
  // kSegments.
  Status CheckSegments(OpenFiles* files, const Job* job);
  // The same of entries of the archives of `checkpoint`, which has these files.
  // REQUIRES: kArchives.
  Status CheckArchives(const Checkpoint& checkpoint, OpenFiles* files,
                       Job* job);

 private:
  struct Digest {
    uint32_t file;
    uint32_t crc;
    uint64_t offset, size;
  };
  using Digests = std::vector<Digest>;

  // Of all workers, by file and offset; they are gone from digests_ then.
  Digests Sorted();
  // The digests in [begin, end) of a file, from position `first` on in sorted
  // ones, as one; nullopt where they do not tile it.
  std::optional<uint32_t> Joined(const Digests& sorted, size_t first,
                                 uint32_t file, uint64_t begin,
                                 uint64_t end) const;

  const DigestKind kind_;
  std::vector<Digests> digests_;  // by worker
};

}  // namespace torch_ckpt
