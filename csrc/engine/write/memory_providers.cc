#include "engine/write/memory_providers.h"

#include <algorithm>
#include <set>

#include "base/checked.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {

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
    if (!source.IsDense()) {
      return InvalidArgument(
          "a tensor on a device is not contiguous; its owner gathers it");
    }
    if (memory->devices_.count(source.device) != 0) continue;
    TC_ASSIGN_OR_RETURN(memory->devices_[source.device],
                        CudaDevice::Process(source.device));
  }
  return memory;
}

PageLocker* DeviceMemory::Locker() const {
  return devices_.empty() ? nullptr : devices_.begin()->second;
}

Status DeviceMemory::Fill(const std::vector<Stretch>& stretches,
                          MutableByteSpan, FillBuffer* buffer) {
  for (const Stretch& stretch : stretches) {
    const SourceTensor& source = sources_[stretch.index];
    copies_.Add(buffer->worker(), devices_.at(source.device),
                source.data + stretch.from,
                buffer->Out(stretch.at, stretch.bytes));
    buffer->Filled(stretch.bytes);
  }
  const std::byte* failed = nullptr;
  Status status = copies_.Begin(buffer->worker(), &failed);
  if (status.ok() || names_ == nullptr) return status;
  for (const Stretch& stretch : stretches) {
    const std::byte* const from = sources_[stretch.index].data + stretch.from;
    if (from <= failed && failed < from + stretch.bytes) {
      return std::move(status).WithTensor((*names_)[stretch.index]);
    }
  }
  return status;
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
