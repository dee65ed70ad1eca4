#include "engine/stage_job.h"

#include <algorithm>
#include <tuple>

#include "plan/layout.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// What one worker copies at a time.
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

// For every source the one that it is a part of, itself for most, and where in
// that one's bytes it begins.
struct Container {
  uint32_t source;
  uint64_t offset;
  uint64_t unit;  // of a container, bytes of its parts' largest elements
};

bool SameBytes(const SourceTensor& a, const SourceTensor& b) {
  return a.device == b.device && a.data == b.data && a.sizes == b.sizes &&
         a.strides == b.strides && a.element_bytes == b.element_bytes;
}

std::vector<Container> FindContainers(
    const std::vector<SourceTensor>& sources) {
  std::vector<Container> containers(sources.size());
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const auto unit = static_cast<uint64_t>(sources[i].element_bytes);
    containers[i] = {i, 0, std::max<uint64_t>(1, unit)};
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
        containers[i] = containers[before];
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
      const uint64_t unit = containers[i].unit;
      if (offset % unit == 0) {
        containers[i] = {reach_index, offset, unit};
        containers[reach_index].unit =
            std::max(containers[reach_index].unit, unit);
        continue;
      }
    }
    if (inside) continue;
    reach = &source;
    reach_index = i;
  }
  return containers;
}

}  // namespace

Result<StagedRegion> RunStageJob(const std::vector<std::string>& names,
                                 const std::vector<SourceTensor>& sources,
                                 const StageOptions& options, Arena* arena,
                                 Job* job) {
  TC_ASSIGN_OR_RETURN(const DeviceMap devices, DevicesOf(sources));
  const std::vector<Container> containers = FindContainers(sources);
  std::vector<LayoutKey> keys;
  keys.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    keys.push_back({sources[i].bytes(),
                    static_cast<int>(8 * sources[i].element_bytes), names[i]});
  }
  std::vector<uint32_t> order = FileOrder(keys);
  std::erase_if(order, [&](uint32_t i) { return containers[i].source != i; });

  StagedRegion region;
  region.offsets.resize(sources.size());
  SourceBytes bytes;
  bytes.Reserve(order.size());
  for (const uint32_t i : order) {
    // So that the elements of a view are aligned.
    bytes.AlignTo(containers[i].unit);
    region.offsets[i] = bytes.size();
    bytes.Append(sources[i]);
  }
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const Container& container = containers[i];
    if (container.source == i) continue;
    region.offsets[i] = region.offsets[container.source] + container.offset;
  }
  region.bytes = bytes.size();
  job->AddTotal(bytes.size());
  TC_ASSIGN_OR_RETURN(
      region.lease, arena->Lease(bytes.size(), options.patience, options.kind));
  std::byte* const base = region.lease.data();

  // Devices copy beside the workers below.
  CudaCopies copies(1);
  struct Waiter {  // the region must not go back while a device writes into it
    CudaCopies* copies;
    ~Waiter() { (void)copies->Wait(0); }
  } waiter{&copies};
  if (!devices.empty()) {
    // Speed only: a system may forbid or limit locked memory.
    (void)region.lease.PageLock(devices.begin()->second);
    uint64_t begun = 0;
    for (const uint32_t i : order) {
      const SourceTensor& source = sources[i];
      if (source.device < 0 || source.bytes() == 0) continue;
      copies.Add(0, devices.at(source.device), source.data,
                 {base + region.offsets[i], source.bytes()});
      begun += source.bytes();
    }
    const std::byte* failed = nullptr;
    Status status = copies.Begin(0, &failed);
    if (!status.ok()) {
      const auto at = std::find_if(order.begin(), order.end(), [&](uint32_t i) {
        const SourceTensor& source = sources[i];
        return source.device >= 0 && source.data <= failed &&
               failed < source.data + source.bytes();
      });
      return at == order.end() ? status
                               : std::move(status).WithTensor(names[*at]);
    }
    job->AddDone(begun);
  }
  const auto chunks =
      static_cast<int64_t>((bytes.size() + kChunkBytes - 1) / kChunkBytes);
  TC_RETURN_IF_ERROR(ForEachItem(
      options.workers, chunks, job, [&](int64_t chunk, int) -> Status {
        const uint64_t begin = static_cast<uint64_t>(chunk) * kChunkBytes;
        std::byte* to = base + begin;
        return bytes.ForEachPart(
            begin, std::min(kChunkBytes, bytes.size() - begin),
            [&](const SourcePart& part) -> Status {
              std::byte* const at = to;
              to += part.size;
              if (part.source != nullptr && part.source->device >= 0) {
                return {};  // begun above
              }
              if (part.dense != nullptr) {
                StreamCopy(at, part.dense, part.size);
              } else {
                GatherPart(part, at);
              }
              job->AddDone(part.size);
              return {};
            });
      }));
  TC_RETURN_IF_ERROR(copies.Wait(0));
  return region;
}

}  // namespace torch_ckpt
