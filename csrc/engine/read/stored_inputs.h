// What jobs read of stored files: runs of a file are fetched, digested and
// delivered in one pass, and proved to be what was stored.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/open/open_files.h"
#include "engine/read/cast_target.h"
#include "engine/read/input_digests.h"
#include "plan/runs.h"
#include "runtime/arena.h"

namespace torch_ckpt {

// What is fetched at once, and the memory for it: kFetchBytes where it is cut
// at multiples of that in its file, as loads are.
inline constexpr uint64_t kFetchBytes = uint64_t{4} << 20;
inline constexpr uint64_t kFetchScratch = kFetchBytes + ByteSource::kSlack;

struct ReadRun {
  Run run;  // of a file
  // Null: run.dst is an address. Else it is where the stored elements would be
  // in this.
  CastTarget* cast = nullptr;
};

// Where runs go that are a part of an output, which is digested by segments as
// their file is: long ones are digested once for both.
struct DigestedOutput {
  struct Row {
    uint64_t dst, bytes;  // in one segment
    uint32_t crc32c;
  };

  uint64_t origin = 0;      // where in dst the output begins, or would
  std::vector<Row> rows{};  // that were copied; the reader adds to them
};

// What is wanted of a file. Nothing here is owned.
struct WantedRuns {
  uint32_t file = 0;
  std::span<const ReadRun> runs;            // by src
  std::span<const DigestedRange> storages;  // sorted; of other files as well
  bool shared = false;                      // see ReadItem
  bool neighbours = false;                  // see ReadPlan
  DigestedOutput* output = nullptr;
};

class StoredInputs {
 public:
  // `workers` call Read. With `verify` what is read is compared with its
  // digests, see InputDigests.
  StoredInputs(std::shared_ptr<OpenFiles> files, bool verify, int workers,
               Wholes wholes = Wholes::kLater);

  // Delivers the runs. Returns their bytes. `scratch`: see ByteSource::Read, of
  // kFetchScratch. `absent`: the lease that it is, where pages of it may not be
  // there; those that are needed are asked for, few of what is in the page
  // cache. What turns out missing, wrong or stale is read once more where
  // FileSet::UntilSure says so; after an error targets may be partly filled.
  // From several threads at once, for different workers.
  Result<uint64_t> Read(int worker, const WantedRuns& wanted,
                        MutableByteSpan scratch,
                        const ArenaLease* absent = nullptr);

  // When all is read: whether the files are still those that were opened, and
  // what was not compared yet is what its digests say. kCorrupt names a file
  // whose bytes do not match, kCancelled where `job` was.
  Status Check(Job* job);

  // By all calls.
  uint64_t bytes_read() const { return read_; }
  uint64_t bytes_verified() const { return verified_; }

 private:
  const std::shared_ptr<OpenFiles> files_;
  const Wholes wholes_;
  // By file: whether it was read here. Others may read of these, too.
  std::vector<std::atomic<bool>> used_;
  InputDigests digests_;
  std::atomic<uint64_t> read_{0}, verified_{0};
};

}  // namespace torch_ckpt
