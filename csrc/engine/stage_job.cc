#include "engine/stage_job.h"

#include <algorithm>
#include <tuple>

#include "plan/layout.h"
#include "runtime/crc32c.h"
#include "runtime/fresh_memory.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// For every source the one that it is a part of, itself for most, and where in
// that one's bytes it begins.
struct Enclosing {
  uint32_t source;
  uint64_t offset;
  uint64_t unit;  // of one that has parts, bytes of its parts' largest elements
};

bool SameBytes(const SourceTensor& a, const SourceTensor& b) {
  return a.device == b.device && a.data == b.data && a.sizes == b.sizes &&
         a.strides == b.strides && a.element_bytes == b.element_bytes;
}

std::vector<Enclosing> FindEnclosing(const std::vector<SourceTensor>& sources) {
  std::vector<Enclosing> enclosing(sources.size());
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const auto unit = static_cast<uint64_t>(sources[i].element_bytes);
    enclosing[i] = {i, 0, std::max<uint64_t>(1, unit)};
    if (sources[i].bytes() > 0) order.push_back(i);
  }
  const auto key = [&](uint32_t i) {
    const SourceTensor& s = sources[i];
    // Where several begin, the longest first; among those, dense ones.
    return std::tuple(s.device, s.data, ~s.bytes(), !s.IsDense());
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
  // The dense source that reaches furthest of those that begin before.
  const SourceTensor* reach = nullptr;
  uint32_t reach_index = 0, before = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    const uint32_t i = order[n];
    const SourceTensor& source = sources[i];
    if (!source.IsDense()) {
      // The same view twice.
      if (n > 0 && SameBytes(source, sources[before])) {
        enclosing[i] = enclosing[before];
      }
      before = i;
      continue;
    }
    before = i;
    const bool inside =
        reach != nullptr && reach->device == source.device &&
        source.data + source.bytes() <= reach->data + reach->bytes();
    if (inside) {
      const auto offset = static_cast<uint64_t>(source.data - reach->data);
      // Elsewhere the elements of the part would not be aligned.
      const uint64_t unit = enclosing[i].unit;
      if (offset % unit == 0) {
        enclosing[i] = {reach_index, offset, unit};
        enclosing[reach_index].unit =
            std::max(enclosing[reach_index].unit, unit);
        continue;
      }
    }
    if (inside) continue;
    reach = &source;
    reach_index = i;
  }
  return enclosing;
}

// Copies a region's bytes from where the tensors are, by several workers.
class StageCopies {
 public:
  // All must outlive this. `bytes` are of `sources`.
  StageCopies(const std::vector<std::string>& names,
              const std::vector<SourceTensor>& sources,
              const SourceBytes& bytes, const DeviceMap& devices, int workers,
              const ArenaLease& lease, Job* job)
      : names_(names),
        sources_(sources),
        bytes_(bytes),
        devices_(devices),
        workers_(std::max(1, workers)),
        lease_(lease),
        job_(job),
        memory_(&lease, devices.empty() ? nullptr : devices.begin()->second),
        copies_(workers_) {}

  // Nothing is copied any more when it returns.
  Status Run() {
    const auto chunks =
        static_cast<int64_t>((bytes_.size() + kFillBytes - 1) / kFillBytes);
    Status first = ForEachItem(
        workers_, chunks, job_,
        [&](int64_t chunk, int worker) { return Fill(chunk, worker); });
    for (int worker = 0; worker < workers_; ++worker) {
      Status status = copies_.Wait(worker);
      if (first.ok()) first = std::move(status);
    }
    return first;
  }

 private:
  Status Fill(int64_t chunk, int worker) {
    TC_RETURN_IF_ERROR(memory_.Take(chunk));
    const uint64_t begin = static_cast<uint64_t>(chunk) * kFillBytes;
    const uint64_t size = std::min<uint64_t>(kFillBytes, bytes_.size() - begin);
    // Devices copy beside this worker.
    uint64_t begun = 0;
    TC_RETURN_IF_ERROR(EachPart(begin, size, true, [&](auto& part, auto* to) {
      copies_.Add(worker, devices_.at(part.source->device),
                  part.source->data + part.begin, {to, part.size});
      begun += part.size;
    }));
    const std::byte* failed = nullptr;
    Status status = copies_.Begin(worker, &failed);
    if (!status.ok()) {
      const SourceTensor* of = nullptr;
      TC_RETURN_IF_ERROR(EachPart(begin, size, true, [&](auto& part, auto*) {
        const std::byte* const at = part.source->data + part.begin;
        if (at <= failed && failed < at + part.size) of = part.source;
      }));
      if (of == nullptr) return status;
      return std::move(status).WithTensor(
          names_[static_cast<size_t>(of - sources_.data())]);
    }
    job_->AddDone(begun);
    return EachPart(begin, size, false, [&](auto& part, auto* to) {
      if (part.dense != nullptr) {
        StreamCopy(to, part.dense, part.size);
      } else {
        GatherPart(part, to);
      }
      job_->AddDone(part.size);
    });
  }

  // Calls fn(part, to) for the parts of a range that are on a device, or not.
  template <class Fn>
  Status EachPart(uint64_t begin, uint64_t size, bool on_device,
                  const Fn& fn) const {
    if (on_device && devices_.empty()) return {};
    std::byte* to = lease_.data() + begin;
    return bytes_.ForEachPart(
        begin, size, [&](const SourcePart& part) -> Status {
          std::byte* const at = to;
          to += part.size;
          const bool is = part.source != nullptr && part.source->device >= 0;
          if (is == on_device) fn(part, at);
          return {};
        });
  }

  const std::vector<std::string>& names_;
  const std::vector<SourceTensor>& sources_;
  const SourceBytes& bytes_;
  const DeviceMap& devices_;
  const int workers_;
  const ArenaLease& lease_;
  Job* const job_;
  FreshMemory memory_;
  CudaCopies copies_;
};

}  // namespace

Result<StagedRegion> RunStageJob(const std::vector<std::string>& names,
                                 const std::vector<SourceTensor>& sources,
                                 const StageOptions& options, Arena* arena,
                                 Job* job) {
  TC_ASSIGN_OR_RETURN(const DeviceMap devices, DevicesOf(sources));
  const std::vector<Enclosing> enclosing = FindEnclosing(sources);
  std::vector<LayoutKey> keys;
  keys.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    keys.push_back({sources[i].bytes(),
                    static_cast<int>(8 * sources[i].element_bytes), names[i]});
  }
  std::vector<uint32_t> order = FileOrder(keys);
  std::erase_if(order, [&](uint32_t i) { return enclosing[i].source != i; });

  StagedRegion region;
  region.offsets.resize(sources.size());
  SourceBytes bytes;
  bytes.Reserve(order.size());
  for (const uint32_t i : order) {
    // So that the elements of a view are aligned.
    bytes.AlignTo(enclosing[i].unit);
    region.offsets[i] = bytes.size();
    bytes.Append(sources[i]);
  }
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const Enclosing& around = enclosing[i];
    if (around.source == i) continue;
    region.offsets[i] = region.offsets[around.source] + around.offset;
  }
  region.bytes = bytes.size();
  job->AddTotal(bytes.size());
  TC_ASSIGN_OR_RETURN(region.lease,
                      arena->Lease(bytes.size(), {.patience = options.patience,
                                                  .kind = options.kind,
                                                  .job = job,
                                                  .present = false}));
  StageCopies copies(names, sources, bytes, devices, options.workers,
                     region.lease, job);
  TC_RETURN_IF_ERROR(copies.Run());
  return region;
}

Status PrepareRegion(uint64_t bytes, const StageOptions& options,
                     Arena* arena) {
  TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                      arena->Lease(bytes, {.patience = options.patience,
                                           .kind = options.kind,
                                           .present = false}));
  FreshMemory memory(&lease, nullptr);
  return ForEachItem(
      options.workers,
      static_cast<int64_t>((lease.size() + kFillBytes - 1) / kFillBytes),
      nullptr, [&](int64_t chunk, int) { return memory.Take(chunk); });
}

}  // namespace torch_ckpt
