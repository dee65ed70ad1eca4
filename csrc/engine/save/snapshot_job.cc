#include "engine/save/snapshot_job.h"

#include <algorithm>
#include <tuple>

#include "base/checked.h"
#include "engine/write/fill.h"
#include "engine/write/literals.h"
#include "engine/write/memory_providers.h"
#include "plan/layout.h"
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

// Fills a region, that of the lease if there is one, by several workers.
// Devices copy beside them, and are waited for at the end. Nothing writes there
// any more when it returns.
Status FillRegion(const ExtentList& extents, int workers,
                  MutableByteSpan region, const ArenaLease* lease, Job* job) {
  const Providers providers({&extents});
  std::optional<FreshMemory> memory;
  if (lease) memory.emplace(lease, providers.locker());
  const auto fill = [&](int64_t piece, int worker) -> Status {
    if (memory) TC_RETURN_IF_ERROR(memory->Take(piece));
    const uint64_t begin = static_cast<uint64_t>(piece) * kFillBytes;
    const uint64_t bytes =
        std::min<uint64_t>(kFillBytes, extents.size() - begin);
    FillBuffer buffer(region.subspan(begin, bytes), begin, worker,
                      FillBuffer::Copies::kStreamed);
    const std::vector<ProviderStretches> asked =
        StretchesByProvider(extents, begin, bytes);
    ArenaLease scratch;
    if (std::any_of(asked.begin(), asked.end(), [](const auto& each) {
          return each.provider->ScratchBytes() > 0;
        })) {
      TC_ASSIGN_OR_RETURN(scratch, LeaseBuffer(providers.scratch_bytes(), job));
      if (PageLocker* locker = providers.locker()) {
        (void)scratch.PageLock(locker, 0, scratch.size());  // speed only
      }
    }
    TC_RETURN_IF_ERROR(BeginStretches(asked, scratch.span(), &buffer));
    job->AddDone(bytes);
    return {};
  };
  const uint64_t pieces = (extents.size() + kFillBytes - 1) / kFillBytes;
  Status first = ForEachItem(workers, static_cast<int64_t>(pieces), job, fill);
  for (Provider* provider : providers.all()) {
    for (int worker = 0; worker < workers; ++worker) {
      Status status = provider->Finish(worker);
      if (first.ok()) first = std::move(status);
    }
  }
  return first;
}

Status CheckRegion(MutableByteSpan region, uint64_t bytes) {
  if (region.size() < bytes) {
    return InvalidArgument("the region has " + std::to_string(region.size()) +
                           " bytes, the tensors take " + std::to_string(bytes));
  }
  if (reinterpret_cast<uintptr_t>(region.data()) % kRegionAlignment != 0) {
    return InvalidArgument("the region does not begin at a multiple of " +
                           std::to_string(kRegionAlignment) + " bytes");
  }
  return {};
}

}  // namespace

Result<Snapshot> RunSnapshotJob(const std::vector<std::string>& names,
                                const std::vector<SourceTensor>& sources,
                                const SnapshotOptions& options, Arena* arena,
                                Job* job) {
  const int workers = std::max(1, options.workers);
  TC_ASSIGN_OR_RETURN(MemorySources memory,
                      MemorySources::Make(sources, &names, workers));
  Zeros zeros;
  const std::vector<Enclosing> enclosing = FindEnclosing(sources);
  std::vector<LayoutKey> keys;
  keys.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    keys.push_back({sources[i].bytes(),
                    static_cast<int>(8 * sources[i].element_bytes), names[i]});
  }
  std::vector<uint32_t> order = FileOrder(keys);
  std::erase_if(order, [&](uint32_t i) { return enclosing[i].source != i; });

  Snapshot region;
  region.offsets.resize(sources.size());
  ExtentList extents;
  extents.Reserve(order.size());
  for (const uint32_t i : order) {
    // So that the elements of a view are aligned.
    const uint64_t at = RoundUp(extents.size(), enclosing[i].unit);
    extents.Append({&zeros, 0}, at - extents.size());
    region.offsets[i] = at;
    extents.Append(memory.Of(i), sources[i].bytes());
  }
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const Enclosing& around = enclosing[i];
    if (around.source == i) continue;
    region.offsets[i] = region.offsets[around.source] + around.offset;
  }
  region.bytes = extents.size();
  job->AddTotal(region.bytes);
  if (options.region) {
    TC_RETURN_IF_ERROR(CheckRegion(*options.region, region.bytes));
    TC_RETURN_IF_ERROR(
        FillRegion(extents, workers, *options.region, nullptr, job));
    return region;
  }
  TC_ASSIGN_OR_RETURN(region.lease,
                      arena->Lease(region.bytes, {.patience = options.patience,
                                                  .kind = options.kind,
                                                  .job = job,
                                                  .present = false}));
  TC_RETURN_IF_ERROR(
      FillRegion(extents, workers, region.lease.span(), &region.lease, job));
  return region;
}

Status PrepareRegion(uint64_t bytes, const SnapshotOptions& options,
                     Arena* arena) {
  TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                      arena->Lease(bytes, {.patience = options.patience,
                                           .kind = options.kind,
                                           .present = false}));
  FreshMemory memory(&lease, nullptr);
  return ForEachItem(
      options.workers,
      static_cast<int64_t>((lease.size() + kFillBytes - 1) / kFillBytes),
      nullptr, [&](int64_t piece, int) { return memory.Take(piece); });
}

}  // namespace torch_ckpt
