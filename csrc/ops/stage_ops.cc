// stage: tensors into one region of host memory, the caller's or a leased one.
// views: tensors that lie in such a region.
//
// Plan of stage:
//   {"job": id, "workers": int, "patience_ms": int, "shared": bool,
//    "names": [fqn] or one text, a name a line}
// with a name per tensor. `offsets` has an int64 for each, where its bytes
// begin in the region. Without a region one is leased. Then the result,
// {"address", "bytes", "region_bytes"} and, where other processes can adopt the
// region, {"fd", "offset"}, is kept in the job, and so is the region: it is
// leased until the job is freed.
#include <algorithm>
#include <chrono>
#include <memory>

#include "engine/save/snapshot_job.h"
#include "engine/write/memory_providers.h"
#include "json/options.h"
#include "ops/overlap.h"
#include "ops/tensors.h"
#include "plan/runs.h"

namespace torch_ckpt::ops {
namespace {

constexpr Field kStagePlan[] = {{"names", FieldType::kNames},
                                {"workers", FieldType::kInteger},
                                {"patience_ms", FieldType::kInteger},
                                {"shared", FieldType::kBool},
                                {"job", FieldType::kInteger}};

// torch makes views of a storage from its beginning on.
Result<SourceTensor> RegionOf(const Tensor& region) {
  TC_ASSIGN_OR_RETURN(const SourceTensor memory,
                      SourceOf(region, "the region"));
  if (DtypeOf(region) != Dtype::kU8 || !memory.IsDense()) {
    return InvalidArgument("the region is not a dense uint8 tensor");
  }
  int64_t begin = 0;
  if (aoti_torch_get_storage_offset(region.get(), &begin) != 0) {
    return Internal("torch says no storage offset");
  }
  if (begin != 0) {
    return InvalidArgument("the region is not the beginning of its storage");
  }
  return memory;
}

// What only Python can use, by the job.
void KeepLease(Snapshot snapshot, Job* job) {
  Json result = {
      {"address", reinterpret_cast<uintptr_t>(snapshot.lease.data())},
      {"bytes", snapshot.bytes},
      {"region_bytes", snapshot.lease.size()}};
  if (const auto place = snapshot.lease.shared()) {
    result["fd"] = place->fd;
    result["offset"] = place->offset;
  }
  job->SetResult(result.dump());
  job->Hold(std::make_shared<ArenaLease>(std::move(snapshot.lease)));
}

constexpr char kWrongOffsets[] =
    "the offsets are not a dense int64 tensor with one for each tensor";

Status RunStage(const std::vector<Tensor>& tensors, const Json& plan, Job* job,
                Tensor& offsets, std::optional<Tensor>& region,
                int64_t* report) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      NamesOfEach(plan, tensors.size()));
  std::vector<SourceTensor> sources;
  sources.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Result<SourceTensor> source = WriteSourceOf(tensors[i]);
    if (!source.ok()) return source.status().WithTensor(names[i]);
    sources.push_back(*source);
  }
  TC_ASSIGN_OR_RETURN(const SourceTensor room,
                      SourceOf(offsets, "the tensor of offsets"));
  if (DtypeOf(offsets) != Dtype::kI64 || !room.IsDense() ||
      room.bytes() != 8 * sources.size()) {
    return InvalidArgument(kWrongOffsets);
  }
  SnapshotOptions options;
  options.workers = WorkersOf(plan);
  if (region) {
    TC_ASSIGN_OR_RETURN(const SourceTensor memory, RegionOf(*region));
    options.region = MutableByteSpan(
        static_cast<std::byte*>(region->mutable_data_ptr()), memory.bytes());
    for (size_t i = 0; i < sources.size(); ++i) {
      if (!ReachesInto(sources[i], *options.region)) continue;
      return InvalidArgument("is in the region already").WithTensor(names[i]);
    }
    TC_RETURN_IF_ERROR(WaitForDevices(sources));  // torch_ckpt does it itself
  } else {
    TC_ASSIGN_OR_RETURN(const int64_t holder, GetInt(plan, "job", 0));
    if (holder == 0) return InvalidArgument("stage needs a region");
  }
  TC_ASSIGN_OR_RETURN(const int64_t patience, GetInt(plan, "patience_ms", 0));
  options.patience = std::chrono::milliseconds(patience);
  if (GetBool(plan, "shared", false)) options.kind = MemoryKind::kShared;
  TC_ASSIGN_OR_RETURN(
      Snapshot snapshot,
      RunSnapshotJob(names, sources, options, &Arena::Snapshots(), job));
  std::copy(snapshot.offsets.begin(), snapshot.offsets.end(),
            static_cast<int64_t*>(offsets.mutable_data_ptr()));
  report[0] = 1;
  report[1] = report[2] = static_cast<int64_t>(snapshot.bytes);
  if (!region) KeepLease(std::move(snapshot), job);
  return {};
}

}  // namespace

void stage(std::vector<Tensor> tensors, Tensor plan, Tensor offsets,
           Tensor report, std::optional<Tensor> region) {
  RunOp("stage", kStagePlan, plan, report,
        [&](const Json& parsed, Job* job, int64_t* values) {
          return RunStage(tensors, parsed, job, offsets, region, values);
        });
}

std::vector<Tensor> views(Tensor region, std::vector<Tensor> like,
                          Tensor offsets) {
  Result<SourceTensor> memory = RegionOf(region);
  ThrowIfError(memory.status());
  Result<SourceTensor> places = SourceOf(offsets, "the tensor of offsets");
  ThrowIfError(places.status());
  if (DtypeOf(offsets) != Dtype::kI64 || !places->IsDense() ||
      places->bytes() != 8 * like.size()) {
    ThrowIfError(InvalidArgument(kWrongOffsets));
  }
  const auto* at = reinterpret_cast<const int64_t*>(places->data);
  std::vector<Tensor> out;
  out.reserve(like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    Result<SourceTensor> tensor = WriteSourceOf(like[i]);
    ThrowIfError(tensor.status());
    const auto offset = static_cast<uint64_t>(at[i]);
    const uint64_t room = memory->bytes();
    if (offset > room || tensor->bytes() > room - offset ||
        offset % static_cast<uint64_t>(tensor->element_bytes) != 0) {
      ThrowIfError(InvalidArgument(
          "tensor " + std::to_string(i) + " of " +
          std::to_string(tensor->bytes()) + " bytes does not fit at offset " +
          std::to_string(at[i]) + " of the region, which has " +
          std::to_string(room)));
    }
    int32_t dtype = 0;
    if (aoti_torch_get_dtype(like[i].get(), &dtype) != 0) {
      ThrowIfError(Internal("a tensor has no dtype"));
    }
    const Dims strides = DenseStrides(tensor->sizes, 1);
    AtenTensorHandle handle = nullptr;
    if (aoti_torch__alloc_from_pool(region.get(), at[i], dtype,
                                    tensor->sizes.size(), tensor->sizes.begin(),
                                    strides.begin(), &handle) != 0) {
      ThrowIfError(Internal("torch makes no view of the region"));
    }
    out.emplace_back(handle);
  }
  return out;
}

}  // namespace torch_ckpt::ops
