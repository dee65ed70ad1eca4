// Proof, after the fact, that bytes read in arbitrary stretches were the right
// ones: CRCs of stretches combine to those of what holds them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/open/open_files.h"
#include "format/ours/catalog.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// When bytes are compared that digests are known only of together with others:
// those of their segment, or of their storage.
enum class Wholes : uint8_t {
  // Segments are read whole and compared before the read returns. Of storages
  // those are compared that turn out to have been read whole, once.
  kAtOnce,
  // What is left out is read in the end.
  kLater,
};

// Bytes that were read, by their CRC-32C, in one segment, or, of archives, by
// their CRC-32.
struct ReadDigest {
  uint32_t file, crc;
  uint64_t offset, size;
};

// What was read and not compared yet.
struct ReadBytes {
  std::vector<ReadDigest> digests;
  std::vector<DigestedRange> storages;  // that they are in
};

// What is compared: the segments of files that have digests in a manifest, all
// with `verify`, else those of files without an id inside, which only digests
// tell from those of another save; of others, with `verify`, the storages of
// archives. `files` outlives this.
class InputDigests {
 public:
  InputDigests(const FileSet& files, bool verify, int workers)
      : files_(files),
        verify_(verify),
        workers_(static_cast<size_t>(workers)) {}

  // Null where its segments are not compared.
  const ManifestFile* SegmentsOf(uint32_t file) const;
  bool of_archives() const { return verify_ && !files_.has_digests(); }

  // Adds it to others: mostly they continue where the last ones ended.
  void Append(const ReadDigest& digest, ReadBytes* to) const;
  static void AppendStorage(const DigestedRange& storage, ReadBytes* to);
  // Each worker calls with its own number, so no lock is taken.
  void Keep(int worker, const ReadBytes& read);

  // Compares every segment and storage that something was kept of. Of a segment
  // whose digests do not tile it (a header before the first tensor, a stretch
  // that was read twice or on another rank) what they leave out is read, or all
  // of it; a storage is read again, only with kLater. kCorrupt names the file;
  // kCancelled where `job` was.
  Status Check(OpenFiles* files, Wholes wholes, Job* job);

 private:
  Status CheckSegments(OpenFiles* files, Job* job);
  Status CheckStorages(OpenFiles* files, Wholes wholes, Job* job);
  uint32_t Combine(uint32_t crc, const ReadDigest& next) const;
  // Of all workers, by file and offset; they are gone there then.
  ReadBytes TakeSorted();
  // The digests in [begin, end) of a file, from position `first` on in sorted
  // ones, as one; nullopt where they do not tile it.
  std::optional<uint32_t> Joined(const std::vector<ReadDigest>& sorted,
                                 size_t first, uint32_t file, uint64_t begin,
                                 uint64_t end) const;

  const FileSet& files_;
  const bool verify_;
  std::vector<ReadBytes> workers_;
};

}  // namespace torch_ckpt
