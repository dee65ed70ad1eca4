#include "engine/open/safetensors_blobs.h"

#include <algorithm>
#include <array>
#include <string>

namespace torch_ckpt {

Result<SafetensorsBlobs::BlobPtr> SafetensorsBlobs::ReadBlob(const File& file,
                                                             uint64_t offset) {
  TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  const uint64_t bytes = info.bytes - std::min(info.bytes, offset);
  std::array<std::byte, sizeof(uint64_t)> first;
  TC_RETURN_IF_ERROR(file.ReadExact(first, offset));
  TC_ASSIGN_OR_RETURN(const uint64_t length, ParseHeaderLength(first, bytes));
  std::string text(length, '\0');
  TC_RETURN_IF_ERROR(
      file.ReadExact({reinterpret_cast<std::byte*>(text.data()), text.size()},
                     offset + first.size()));
  auto blob = std::make_shared<Blob>();
  TC_ASSIGN_OR_RETURN(blob->file.header,
                      ParseSafetensorsHeader(AsBytes(text), bytes));
  TC_ASSIGN_OR_RETURN(blob->file.sharding,
                      ParseShardingInfo(blob->file.header));
  const std::vector<SafetensorsEntry>& tensors = blob->file.header.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    blob->by_name[tensors[i].name] = i;
  }
  return BlobPtr(std::move(blob));
}

Result<SafetensorsBlobs::BlobPtr> SafetensorsBlobs::BlobOf(
    const File& file, const Placement& placement) {
  const std::pair key(placement.file, placement.offset);
  {
    const std::lock_guard lock(mutex_);
    const auto known = blobs_.find(key);
    if (known != blobs_.end()) return known->second;
  }
  // Not under the lock: at worst two threads read it.
  TC_ASSIGN_OR_RETURN(BlobPtr blob, ReadBlob(file, placement.offset));
  const std::lock_guard lock(mutex_);
  return blobs_[key] = std::move(blob);
}

Result<Placement> SafetensorsBlobs::Resolve(const File& file,
                                            const Placement& placement,
                                            std::string_view name,
                                            Dtype dtype) {
  TC_ASSIGN_OR_RETURN(const BlobPtr blob, BlobOf(file, placement));
  const auto found = blob->by_name.find(name);
  if (found == blob->by_name.end()) return Corrupt("holds no such tensor");
  const SafetensorsEntry* at = &blob->file.header.tensors[found->second];
  const ShardEntry* shard = blob->file.sharding.Find(found->second);
  const Dims offsets =
      shard ? shard->offsets : Dims::Filled(at->shape.size(), 0);
  if (at->dtype != dtype || !(at->shape == placement.box.sizes) ||
      !(offsets == placement.box.offsets)) {
    return Corrupt(std::string("holds ") + DtypeName(at->dtype) + " " +
                   Box{offsets, at->shape}.ToString() +
                   " where the metadata says " + DtypeName(dtype) + " " +
                   placement.box.ToString());
  }
  Placement out = placement;
  out.kind = PlacementKind::kBox;
  out.bytes = 0;
  out.offset += blob->file.header.data_begin + at->begin;
  return out;
}

}  // namespace torch_ckpt
