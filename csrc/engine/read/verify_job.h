// The verify job: does every byte of a checkpoint match its digest?
#pragma once

#include <memory>

#include "engine/open/checkpoint.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

struct VerifyOptions {
  int workers = 2;
  bool direct_io = true;  // past the page cache, where that goes
  // Of the bytes, or of the archives, one of so many shares that together are
  // all.
  int64_t share = 0, shares = 1;
};

// Of the share.
struct VerifyReport {
  uint64_t bytes = 0;
  uint64_t files = 0;
};

// Reads all files that the manifest names and compares every segment. Opening
// the checkpoint has compared names, sizes and ids. Of a directory of
// torch.save archives it compares the entries with the CRC-32s of these, where
// they have any; one without either is kUnsupported. kCorrupt names the file.
Result<VerifyReport> RunVerifyJob(std::shared_ptr<const Checkpoint> checkpoint,
                                  const VerifyOptions& options, Job* job);

}  // namespace torch_ckpt
