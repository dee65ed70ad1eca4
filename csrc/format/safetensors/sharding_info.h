// What a data file says about itself in __metadata__:
//
//   "torch_ckpt.file_id"        32 lower-case hex digits, the first key of a
//                               file of ours, so that it stands in the first
//                               4 KiB and is checked without parsing
//   "format"                    "pt"
//   "DCP_VERSION"               "1.0"
//   "DCP_SHARDING_INFO"         {fqn: {"saved_offsets": [int, ...]}}, as stock
//   "torch_ckpt.global_shapes"  {fqn: [int, ...]}: what stock leaves out; only
//                               for tensors that are not whole in this file
//   "torch_ckpt.packed_boxes"   {fqn: [[offsets and sizes], ...]}: tensors of
//                               which the file has several boxes that make no
//                               box together
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/safetensors/safetensors.h"

namespace torch_ckpt {

inline constexpr std::string_view kFileIdKey = "torch_ckpt.file_id";
inline constexpr std::string_view kGlobalShapesKey = "torch_ckpt.global_shapes";
inline constexpr std::string_view kPackedBoxesKey = "torch_ckpt.packed_boxes";
inline constexpr std::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

struct ShardEntry {
  Dims offsets;
  // Absent when the file cannot tell (shards that stock wrote).
  std::optional<Dims> global_shape;
  // In a packed entry, these: row-major, one behind the other. In the file it
  // has one dimension, in which they are counted in elements; `offsets` is 0,
  // and the global shape is said. In others none.
  std::vector<Box> packed{};
};

// Calls fn(box) for the boxes of an entry of `shape` in the file, in the order
// of their bytes. `shard` may be null.
template <class Fn>
void ForEachBox(const Dims& shape, const ShardEntry* shard, const Fn& fn) {
  if (!shard) {
    fn(Box::Whole(shape));
  } else if (shard->packed.empty()) {
    fn(Box{shard->offsets, shape});
  } else {
    for (const Box& box : shard->packed) fn(box);
  }
}

// Ok where `shard` may be what a packed entry of that dtype and shape says: its
// boxes are in its global shape, none is empty, and together they are as long
// as it.
Status CheckPacked(Dtype dtype, const Dims& shape, const ShardEntry& shard);

struct ShardingInfo {
  std::string file_id;             // empty when the file is not ours
  bool has_sharding_info = false;  // false: whole tensors at offset 0
  // In the order of header.tensors; none where the file says nothing of shards.
  std::vector<ShardEntry> entries;

  // Of that tensor; null where it is whole.
  const ShardEntry* Find(size_t tensor) const {
    return entries.empty() ? nullptr : &entries[tensor];
  }
};

// Reads and checks the keys above against the tensors of the header: every
// name exists, ranks agree, offsets are non-negative, boxes inside the global
// shape.
Result<ShardingInfo> ParseShardingInfo(const SafetensorsHeader& header);

// The metadata of a file of ours. With `shards`, one for each of `tensors`, the
// sharding keys too; final Hugging Face files have none.
std::vector<std::pair<std::string, std::string>> BuildFileMetadata(
    std::string_view file_id, const std::vector<SafetensorsEntry>& tensors,
    const std::vector<ShardEntry>* shards);

// The file id in the first bytes of a file of ours, or empty.
std::string PeekFileId(ByteSpan first_bytes);

}  // namespace torch_ckpt
