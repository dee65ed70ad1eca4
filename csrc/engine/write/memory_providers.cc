#include "engine/write/memory_providers.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "base/checked.h"
#include "engine/write/output_files.h"
#include "plan/copy_run.h"
#include "plan/packed_run.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Bytes of one source on a device that has strides, for one worker.
class StridedCopies {
 public:
  // `arrive`: returns when all is there that was added to `copies`.
  StridedCopies(const SourceTensor& source, CudaDevice* device,
                CudaCopies* copies, int worker, MutableByteSpan scratch,
                std::function<Status()> arrive)
      : source_(source),
        device_(device),
        copies_(copies),
        worker_(worker),
        scratch_(scratch),
        arrive_(std::move(arrive)) {}

  // Of its row-major order those from `from` on. They may begin and end within
  // an element, and may be added only when this returns.
  Status Fill(uint64_t from, MutableByteSpan out) {
    const auto unit = static_cast<uint64_t>(source_.element_bytes);
    while (!out.empty()) {
      const uint64_t into = from % unit;
      uint64_t bytes = RoundDown(out.size(), unit);
      if (into == 0 && bytes > 0) {
        TC_RETURN_IF_ERROR(FillElements(from, out.first(bytes)));
      } else {
        bytes = std::min<uint64_t>(unit - into, out.size());
        std::array<std::byte, kMostElementBytes> element;
        TC_RETURN_IF_ERROR(
            FillElements(from - into, MutableByteSpan(element).first(unit)));
        TC_RETURN_IF_ERROR(arrive_());
        std::memcpy(out.data(), element.data() + into, bytes);
      }
      from += bytes;
      out = out.subspan(bytes);
    }
    return {};
  }

 private:
  static constexpr size_t kMostElementBytes = 16;

  Status FillElements(uint64_t from, MutableByteSpan out) {
    for (const Run& run : RunsOf(source_, from, out.size())) {
      TC_RETURN_IF_ERROR(FillRun(run, out));
    }
    return {};
  }

  Status FillRun(const Run& run, MutableByteSpan out) {
    const std::optional<PackedRun> packed = Pack(run, scratch_.size());
    if (!packed) {
      const auto [first, second] = Halved(run);
      TC_RETURN_IF_ERROR(FillRun(first, out));
      return FillRun(second, out);
    }
    if (packed->as_wanted) {
      AddRows(*packed, out.subspan(run.dst, packed->bytes));
      return {};
    }
    AddRows(*packed, scratch_.first(packed->bytes));
    TC_RETURN_IF_ERROR(arrive_());
    CopyRun(packed->run, scratch_.data(), 0, out.data(), 0);
    return {};
  }

  void AddRows(const PackedRun& packed, MutableByteSpan to) {
    for (const PackedRows& rows : packed.rows) {
      const std::byte* const from = source_.data + rows.from;
      const MutableByteSpan into = to.first(rows.bytes * rows.count);
      copies_->AddRows(worker_, device_,
                       {from, rows.bytes, rows.pitch, rows.count}, into);
      to = to.subspan(into.size());
    }
  }

  const SourceTensor& source_;
  CudaDevice* const device_;
  CudaCopies* const copies_;
  const int worker_;
  const MutableByteSpan scratch_;
  const std::function<Status()> arrive_;
};

}  // namespace

HostMemory::HostMemory(const std::vector<SourceTensor>& sources)
    : sources_(sources) {
  dense_.reserve(sources.size());
  for (const SourceTensor& source : sources) {
    dense_.push_back(source.device < 0 && source.IsDense());
  }
}

const std::byte* HostMemory::Find(const Stretch& stretch) const {
  return dense_[stretch.index] ? sources_[stretch.index].data + stretch.from
                               : nullptr;
}

Status HostMemory::Fill(const std::vector<Stretch>& stretches, MutableByteSpan,
                        FillBuffer* buffer) {
  for (const Stretch& stretch : stretches) {
    if (const std::byte* bytes = Find(stretch)) {
      buffer->Copy(stretch.at, {bytes, stretch.bytes});
      continue;
    }
    // In steps of whole elements that are digested while they are in the cache.
    const SourceTensor& source = sources_[stretch.index];
    const auto unit = static_cast<uint64_t>(source.element_bytes);
    for (uint64_t done = 0; done < stretch.bytes;) {
      const uint64_t from = stretch.from + done;
      const uint64_t until = RoundDown(from + kDigestStep, unit);
      const uint64_t bytes = std::min(stretch.bytes - done, until - from);
      buffer->Filled(
          Gather(source, from, buffer->Out(stretch.at + done, bytes)));
      buffer->Made(stretch.at + done, bytes);
      done += bytes;
    }
  }
  return {};
}

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::Make(
    const std::vector<SourceTensor>& sources,
    const std::vector<std::string>* names, int workers) {
  std::unique_ptr<DeviceMemory> memory(
      new DeviceMemory(sources, names, workers));
  for (const SourceTensor& source : sources) {
    if (source.device < 0 || source.bytes() == 0) continue;
    memory->has_strides_ = memory->has_strides_ || !source.IsDense();
    if (memory->devices_.count(source.device) != 0) continue;
    TC_ASSIGN_OR_RETURN(memory->devices_[source.device],
                        CudaDevice::Process(source.device));
  }
  return memory;
}

PageLocker* DeviceMemory::Locker() const {
  return devices_.empty() ? nullptr : devices_.begin()->second;
}

uint64_t DeviceMemory::ScratchBytes() const {
  return has_strides_ ? kPieceBytes : 0;
}

Status DeviceMemory::Begin(const std::vector<Stretch>& stretches, int worker) {
  const std::byte* failed = nullptr;
  Status status = copies_.Begin(worker, &failed);
  if (status.ok() || names_ == nullptr) return status;
  for (const Stretch& stretch : stretches) {
    const SourceTensor& source = sources_[stretch.index];
    if (source.data <= failed && failed < source.data + source.Span()) {
      return std::move(status).WithTensor((*names_)[stretch.index]);
    }
  }
  return status;
}

Status DeviceMemory::Fill(const std::vector<Stretch>& stretches,
                          MutableByteSpan scratch, FillBuffer* buffer) {
  const int worker = buffer->worker();
  for (const Stretch& stretch : stretches) {
    const SourceTensor& source = sources_[stretch.index];
    CudaDevice* const device = devices_.at(source.device);
    const MutableByteSpan out = buffer->Out(stretch.at, stretch.bytes);
    if (source.IsDense()) {
      copies_.Add(worker, device, source.data + stretch.from, out);
    } else {
      StridedCopies copies(source, device, &copies_, worker, scratch, [&] {
        const Status begun = Begin(stretches, worker);
        // In any case: what has begun fills memory of others.
        const Status waited = copies_.Wait(worker);
        return begun.ok() ? waited : begun;
      });
      TC_RETURN_IF_ERROR(copies.Fill(stretch.from, out));
    }
    buffer->Filled(stretch.bytes);
  }
  return Begin(stretches, worker);
}

Status WaitForDevices(const std::vector<SourceTensor>& sources) {
  std::set<int> waited;
  for (const SourceTensor& source : sources) {
    if (source.device < 0 || !waited.insert(source.device).second) continue;
    TC_ASSIGN_OR_RETURN(const CudaDevice* const device,
                        CudaDevice::Process(source.device));
    TC_RETURN_IF_ERROR(device->WaitForAll());
  }
  return {};
}

Result<MemorySources> MemorySources::Make(
    const std::vector<SourceTensor>& sources,
    const std::vector<std::string>* names, int workers) {
  MemorySources memory(sources);
  TC_ASSIGN_OR_RETURN(memory.device_,
                      DeviceMemory::Make(sources, names, workers));
  return memory;
}

Origin MemorySources::Of(size_t source,
                         const std::optional<ElementCast>& cast) {
  Provider* provider = host_.get();
  if ((*sources_)[source].device >= 0) provider = device_.get();
  const Origin origin{provider, source};
  return cast ? casts_->Add(origin, cast->from, cast->to, cast->fqn) : origin;
}

}  // namespace torch_ckpt
