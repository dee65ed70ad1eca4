// What a merge leaves in staging for the one that comes after it was killed.
//
//   merge_plan          which merge it is, and the ids of its files
//   merge_log.<id>      a line for each range that a process has written
//
// A line is "<file> <begin> <end> <digests> <CRC of the line so far>". It is
// written behind the bytes and neither is synced: lines that are torn do not
// count, and what the others say is compared with the bytes. So after a kill,
// or even a crash of the machine, what is there is kept, and the rest done
// again.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "engine/merge_plan.h"

namespace torch_ckpt {

// What must be the same for a merge to go on: the input and what is made of it.
// Errors are those of looking at the input's files.
Result<std::string> MergeIdentity(const MergePlan& plan);

struct MergeMark {
  std::string identity;
  std::vector<std::string> ids;
};
Status WriteMergeMark(const Directory& staging, const MergeMark& mark);
// None where there is none, or one that is torn.
std::optional<MergeMark> ReadMergeMark(const Directory& staging);

// Whether a file in staging is a mark or a log.
bool IsMergeLog(std::string_view name);

// Adds lines to a log of its own. Thread-safe.
class MergeLog {
 public:
  static Result<MergeLog> Create(const Directory& staging);
  MergeLog(MergeLog&&) noexcept;
  Status Add(size_t file, const WrittenRange& range);

 private:
  explicit MergeLog(File file) : file_(std::move(file)) {}
  File file_;
  std::atomic<uint64_t> end_{0};
};

// What the logs say of `files` and the bytes confirm, ascending and apart.
// The files themselves are synced where anything of them is kept.
Result<std::vector<std::vector<WrittenRange>>> ReadMergeLogs(
    const Directory& staging, const std::vector<OutputSpec>& files);

}  // namespace torch_ckpt
