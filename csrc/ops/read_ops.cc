// read: boxes of a checkpoint into tensors. crc32c: a digest of a tensor.
// digests: one of each of many.
//
// Plan of read:
//   {"checkpoint": id of an opened one, or "path": directory, "job": id or 0,
//    "format": word, "workers": int, "verify": bool, "direct_io": bool,
//    "names": [fqn] or one text, a name a line,
//    "offsets": [[int] or null], "files": {"i": name}, "shared": [i] or null,
//    "meeting": word}
// Item i goes into targets[i]: the box of the target's size at `offsets` (null:
// zeros) of the global tensor, cast to the target's dtype where it is stored as
// another; or, where "files" has i, that whole file.
// "shared" is there when other processes of this machine read the checkpoint as
// well, and lists the items that they want too.
// "meeting" is for targets that lie in one stretch of memory. Without it those
// that share a byte are an error, as far as can be seen. "return": then nothing
// is read, the result is {"met": true} and the report all 0, so that the caller
// looks closer, and calls again with "allow".
#include <algorithm>
#include <array>

#include "engine/read/read_job.h"
#include "json/held.h"
#include "json/options.h"
#include "ops/overlap.h"
#include "ops/tensors.h"
#include "runtime/crc32c.h"

namespace torch_ckpt::ops {
namespace {

constexpr Field kReadPlan[] = {
    {"checkpoint", FieldType::kInteger}, {"path", FieldType::kString},
    {"format", FieldType::kString},      {"names", FieldType::kNames},
    {"offsets", FieldType::kList},       {"files", FieldType::kObject},
    {"shared", FieldType::kList},        {"workers", FieldType::kInteger},
    {"verify", FieldType::kBool},        {"direct_io", FieldType::kBool},
    {"job", FieldType::kInteger},        {"meeting", FieldType::kString}};

Result<ReadItem> ParseItem(const Json& plan, size_t i, std::string name,
                           const Checkpoint& checkpoint,
                           const TargetTensor& target) {
  ReadItem item;
  item.target = i;
  item.name = std::move(name);
  const auto files = plan.find("files");
  if (files != plan.end() && files->is_object()) {
    const auto file = files->find(std::to_string(i));
    if (file != files->end()) {
      if (!file->is_string()) {
        return InvalidArgument("'files' has names of files");
      }
      item.file = file->get<std::string>();
      return item;
    }
  }
  item.box.sizes = target.sizes;
  const int64_t entry = checkpoint.catalog().Find(item.name);
  if (entry >= 0) {
    const Dtype dtype =
        checkpoint.catalog().entries()[static_cast<size_t>(entry)].dtype;
    // Of codes that are made numbers the target has each.
    const bool packed =
        checkpoint.FindScaled(static_cast<uint32_t>(entry)) == nullptr;
    if (packed && DtypeBits(dtype) < 8 && !item.box.sizes.empty()) {
      item.box.sizes[item.box.sizes.size() - 1] *= DtypeUnit(dtype).elements;
    }
  }
  TC_ASSIGN_OR_RETURN(const auto offsets, GetDimsAt(plan, "offsets", i));
  item.box.offsets =
      offsets ? *offsets : Dims::Filled(item.box.sizes.size(), 0);
  return item;
}

Result<TargetTensor> TargetOf(const SourceTensor& memory) {
  if (OverlapsItself(memory)) {
    return InvalidArgument(
        "the target is expanded or overlaps itself: several of its elements "
        "are one place in memory");
  }
  return TargetTensor{const_cast<std::byte*>(memory.data), memory.sizes,
                      memory.strides, memory.element_bytes};
}

// Which of two targets in one place is filled last is left to chance.
Status CheckApart(const std::vector<SourceTensor>& targets,
                  const std::vector<ReadItem>& items) {
  const auto shared = FindOverlap(targets);
  if (!shared) return {};
  return InvalidArgument("the target shares memory with that of '" +
                         items[shared->first].name + "': pass one of them")
      .WithTensor(items[shared->second].name);
}

Result<std::string> MeetingOf(const Json& plan) {
  const auto given = plan.find("meeting");
  if (given == plan.end() || given->is_null()) return std::string();
  auto word = given->get<std::string>();
  if (word == "return" || word == "allow") return word;
  return InvalidArgument("'meeting' is \"return\" or \"allow\"");
}

// A list with an entry for each target, where there is one.
Status CheckOffsets(const Json& plan, size_t count) {
  TC_ASSIGN_OR_RETURN(const Json* offsets, GetList(plan, "offsets"));
  const auto given = plan.find("offsets");
  if (given == plan.end() || given->is_null() || offsets->size() == count) {
    return {};
  }
  return InvalidArgument("'offsets' has " + std::to_string(offsets->size()) +
                         " entries for " + std::to_string(count) + " tensors");
}

// What the elements of `target` are, unless `item` is bytes of a file.
Status SetDtype(const Tensor& tensor, const ReadItem& item,
                TargetTensor* target) {
  if (!item.file.empty()) return {};
  target->cast_to = DtypeOf(tensor);
  if (target->cast_to) return {};
  return Unsupported("the target has a dtype that no file holds")
      .WithTensor(item.name);
}

Status RunRead(const std::vector<Tensor>& tensors, const Json& plan, Job* job,
               int64_t* report) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointNamedBy(plan));
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      NamesOfEach(plan, tensors.size()));
  TC_RETURN_IF_ERROR(CheckOffsets(plan, tensors.size()));
  TC_ASSIGN_OR_RETURN(const std::string meeting, MeetingOf(plan));
  ReadPlan read_plan;
  read_plan.workers = WorkersOf(plan);
  read_plan.verify = GetBool(plan, "verify", true);
  read_plan.direct_io = GetBool(plan, "direct_io", true);
  const auto shared = plan.find("shared");
  read_plan.neighbours = shared != plan.end() && shared->is_array();
  std::vector<SourceTensor> memory;
  std::vector<TargetTensor> targets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Result<SourceTensor> place = SourceOf(tensors[i]);
    if (!place.ok()) return place.status().WithTensor(names[i]);
    memory.push_back(*place);
    const Result<TargetTensor> target = TargetOf(*place);
    if (!target.ok()) return target.status().WithTensor(names[i]);
    targets.push_back(*target);
    TC_ASSIGN_OR_RETURN(ReadItem item, ParseItem(plan, i, std::move(names[i]),
                                                 *checkpoint, targets.back()));
    TC_RETURN_IF_ERROR(SetDtype(tensors[i], item, &targets.back()));
    read_plan.items.push_back(std::move(item));
  }
  if (meeting != "allow" && SpansMeet(memory)) {
    if (meeting == "return") {
      job->SetResult(Json{{"met", true}}.dump());
      return {};
    }
    TC_RETURN_IF_ERROR(CheckApart(memory, read_plan.items));
  }
  if (read_plan.neighbours) {
    for (const Json& item : *shared) {
      if (!item.is_number_unsigned() ||
          item.get<uint64_t>() >= read_plan.items.size()) {
        return InvalidArgument("'shared' lists items of the plan");
      }
      read_plan.items[item.get<uint64_t>()].shared = true;
    }
  }
  TC_ASSIGN_OR_RETURN(const ReadReport done,
                      RunReadJob(checkpoint, read_plan, targets, job));
  job->SetResult(Json{{"bytes_needed", done.bytes_needed},
                      {"bytes_read", done.bytes_read},
                      {"bytes_verified", done.bytes_verified}}
                     .dump());
  report[0] = 1;
  report[1] = static_cast<int64_t>(done.bytes_needed);
  report[2] = static_cast<int64_t>(done.bytes_read);
  report[3] = static_cast<int64_t>(done.bytes_verified);
  return {};
}

uint32_t DigestOf(const SourceTensor& source) {
  const uint64_t bytes = source.bytes();
  if (source.IsDense()) return torch_ckpt::Crc32c(0, source.data, bytes);
  std::array<std::byte, 4096> scratch;
  uint32_t crc = 0;
  for (uint64_t from = 0; from < bytes; from += scratch.size()) {
    const uint64_t size = std::min<uint64_t>(scratch.size(), bytes - from);
    Gather(source, from, MutableByteSpan(scratch.data(), size));
    crc = torch_ckpt::Crc32c(crc, scratch.data(), size);
  }
  return crc;
}

}  // namespace

void read(std::vector<Tensor> targets, Tensor plan, Tensor report) {
  RunOp("read", kReadPlan, plan, report,
        [&](const Json& parsed, Job* job, int64_t* values) {
          return RunRead(targets, parsed, job, values);
        });
}

void crc32c(Tensor data, Tensor report) {
  Result<int64_t*> values = ReportOf(report);
  ThrowIfError(values.status());
  Result<SourceTensor> source = SourceOf(data);
  ThrowIfError(source.status());
  if (!source->IsDense()) {
    ThrowIfError(InvalidArgument("the tensor is not contiguous"));
  }
  (*values)[1] = static_cast<int64_t>(
      torch_ckpt::Crc32c(0, source->data, source->bytes()));
  (*values)[0] = 1;
}

void digests(std::vector<Tensor> tensors, Tensor digests) {
  Result<SourceTensor> room = SourceOf(digests, "the tensor of digests");
  ThrowIfError(room.status());
  if (DtypeOf(digests) != Dtype::kI64 || !room->IsDense() ||
      room->bytes() != 8 * tensors.size()) {
    ThrowIfError(InvalidArgument(
        "the digests are not a dense int64 tensor with one for each tensor"));
  }
  auto* values = static_cast<int64_t*>(digests.mutable_data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i) {
    // What has no memory is for the save to refuse, and by its name.
    const Result<SourceTensor> source = SourceOf(tensors[i]);
    values[i] = source.ok() ? int64_t{DigestOf(*source)} : -1;
  }
}

}  // namespace torch_ckpt::ops
