// What jobs read of stored files: in ascending order, together where it lies
// together, and compared with its digests when all is done.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "engine/open/open_files.h"
#include "engine/open/stored_view.h"
#include "engine/read/input_digests.h"
#include "engine/write/fill_buffer.h"
#include "plan/runs.h"

namespace torch_ckpt {

class StoredInputs {
 public:
  // What is fetched at once, and the memory that Read wants for it.
  static constexpr uint64_t kFetchBytes = uint64_t{4} << 20;
  static constexpr uint64_t kScratchBytes = kFetchBytes + ByteSource::kSlack;

  // With `verify` what is read is compared with its digests.
  StoredInputs(std::shared_ptr<OpenFiles> files, bool verify, int workers);

  // Fills the buffer with what the runs are, whose dst counts in it; sorts
  // them. From several threads
  // at once, for different workers.
  Status Read(std::vector<StoredRun>* runs, MutableByteSpan scratch,
              FillBuffer* buffer);

  // See InputDigests::Expect.
  void Expect(int worker, std::span<const DigestedRange> storages) {
    digests_.Expect(worker, storages);
  }

  // When all is read: whether the files are still those that were opened, and
  // what was read of them is what their digests say. kCorrupt names a file
  // whose bytes do not match.
  Status Check(Job* job);

 private:
  // A run that stands in the buffer as in its file: one pass over memory copies
  // it and digests it for both, in steps that lie in one segment of either.
  Status Stream(const StoredRun& stored, MutableByteSpan scratch,
                FillBuffer* buffer);
  // `count` runs of one file that are fetched together, up to byte `hi`.
  Status Fetch(const StoredRun* group, size_t count, uint64_t hi,
               MutableByteSpan scratch, FillBuffer* buffer);
  // A strided run that spans more than fits: window by window.
  Status FetchWindows(const ByteSource& source, const Run& run,
                      MutableByteSpan scratch, FillBuffer* buffer);

  Result<std::shared_ptr<const ByteSource>> Open(uint32_t file);

  const std::shared_ptr<OpenFiles> files_;
  // By file: whether it was read here. Others may read of these, too.
  std::vector<std::atomic<bool>> read_;
  InputDigests digests_;
};

}  // namespace torch_ckpt
