// Proof, after the fact, that bytes read in arbitrary stretches were the right
// ones: CRC-32C values of stretches combine to those of their segments.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/open/open_files.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

class InputDigests {
 public:
  explicit InputDigests(int workers) : digests_(static_cast<size_t>(workers)) {}

  // Bytes [offset, offset + size) of a file were read as `data`. Each worker
  // calls with its own number, so no lock is taken.
  void Add(int worker, uint32_t file, uint64_t offset, const std::byte* data,
           uint64_t size);
  // The same of bytes in one segment that are known by their CRC.
  void Add(int worker, uint32_t file, uint64_t offset, uint32_t crc,
           uint64_t size);
  // Bytes of [lo, hi) were used, but not in a form that Add can digest.
  void Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi);
  // Compares every segment that was touched. A segment whose digests do not
  // tile it exactly (a stretch was read twice, left out, or on another rank) is
  // read again. Ok where the files have no digests. kCorrupt names the file;
  // kCancelled where `job` was.
  Status Check(OpenFiles* files, const Job* job);

 private:
  struct Digest {
    uint32_t file;
    uint32_t crc;
    uint64_t offset, size;
  };
  std::vector<std::vector<Digest>> digests_;  // by worker
};

}  // namespace torch_ckpt
