#include "format/safetensors/short_header.h"

#include <algorithm>

#include "base/checked.h"
#include "format/binary.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kMagic = "TCKPTHDR";
constexpr uint64_t kVersion = 2;
// Room made at once; more comes as tensors do, so that a count that lies costs
// little memory.
constexpr uint64_t kMaxReserved = uint64_t{1} << 16;

Status Malformed(const char* what) {
  return Corrupt(std::string("the short header is damaged: ") + what);
}

// How the box of a tensor is said.
enum BoxForm : uint64_t { kOneBox, kWholeTensor, kPackedBoxes, kBoxForms };

// The boxes of a packed tensor of `entry`.
Status ReadPacked(BinaryReader* in, const SafetensorsEntry& entry,
                  ShardEntry* shard) {
  const auto rank = in->Bounded(kMaxDims);
  if (!rank) return Malformed("a packed tensor");
  const int dims = static_cast<int>(*rank);
  shard->global_shape = in->Sizes(dims);
  const auto count = in->Bounded(in->left());
  const auto bytes = ByteSize(entry.dtype, entry.shape);
  if (!shard->global_shape || dims == 0 || !count || *count == 0 ||
      !bytes.ok() || *count > *bytes) {
    return Malformed("a packed tensor");
  }
  for (uint64_t i = 0; i < *count; ++i) {
    const auto offsets = in->Sizes(dims);
    const auto sizes = in->Sizes(dims);
    if (!offsets || !sizes) return Malformed("a packed box");
    shard->packed.push_back({*offsets, *sizes});
  }
  shard->offsets = {0};
  return CheckPacked(entry.dtype, entry.shape, *shard).ok()
             ? Status()
             : Malformed("packed boxes");
}

// Tensor `name` from `begin` of the data on.
Status ReadTensor(BinaryReader* in, uint64_t begin, FileHeader* out) {
  auto name = in->String(kMaxNameBytes);
  const auto dtype = in->Bounded(kDtypeCount - 1);
  const auto rank = in->Bounded(kMaxDims);
  if (!name || !dtype || !rank) return Malformed("a tensor");
  const auto shape = in->Sizes(static_cast<int>(*rank));
  const auto form = in->Bounded(kBoxForms - 1);
  if (!shape || !form) return Malformed("a shape");
  SafetensorsEntry entry{std::move(*name), static_cast<Dtype>(*dtype), *shape,
                         begin, 0};
  ShardEntry shard{Dims::Filled(shape->size(), 0), *shape};
  if (*form != kWholeTensor && !out->sharding.has_sharding_info) {
    return Malformed("a box");
  }
  if (*form == kPackedBoxes) {
    TC_RETURN_IF_ERROR(ReadPacked(in, entry, &shard));
  } else if (*form == kOneBox) {
    const auto offsets = in->Sizes(shape->size());
    const auto global_shape = in->Sizes(shape->size());
    if (!offsets || !global_shape) return Malformed("a box");
    if (Box{*offsets, *shape} == Box::Whole(*global_shape)) {
      return Malformed("a whole box that is not marked as one");
    }
    shard = {*offsets, *global_shape, {}};
  }
  const auto bytes = ByteSize(entry.dtype, entry.shape);
  const auto end = CheckedAdd(begin, bytes.ok() ? *bytes : 0);
  if (!bytes.ok() || !end || !ByteSize(entry.dtype, *shard.global_shape).ok()) {
    return Malformed("a size");
  }
  if (shard.packed.empty() &&
      !Inside({shard.offsets, entry.shape}, *shard.global_shape)) {
    return Malformed("a box outside its tensor");
  }
  entry.end = *end;
  out->header.tensors.push_back(std::move(entry));
  if (out->sharding.has_sharding_info) {
    out->sharding.entries.push_back(std::move(shard));
  }
  return {};
}

}  // namespace

std::string EncodeShortHeader(const FileHeader& file, uint32_t text_crc32c) {
  const SafetensorsHeader& header = file.header;
  std::string out(kMagic);
  out.reserve(64 * header.tensors.size());
  PutVarint(&out, kVersion);
  PutVarint(&out, text_crc32c);
  PutVarint(&out, header.data_begin);
  PutVarint(&out, header.file_bytes);
  PutString(&out, file.sharding.file_id);
  PutVarint(&out, file.sharding.has_sharding_info ? 1 : 0);
  PutVarint(&out, header.tensors.size());
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    const SafetensorsEntry& entry = header.tensors[i];
    const ShardEntry* shard = file.sharding.Find(i);
    PutString(&out, entry.name);
    PutVarint(&out, static_cast<uint64_t>(entry.dtype));
    PutVarint(&out, static_cast<uint64_t>(entry.shape.size()));
    PutDims(&out, entry.shape);
    if (shard && !shard->packed.empty()) {
      PutVarint(&out, kPackedBoxes);
      PutVarint(&out, static_cast<uint64_t>(shard->global_shape->size()));
      PutDims(&out, *shard->global_shape);
      PutVarint(&out, shard->packed.size());
      for (const Box& box : shard->packed) {
        PutDims(&out, box.offsets);
        PutDims(&out, box.sizes);
      }
      continue;
    }
    const bool whole = !shard || Box{shard->offsets, entry.shape} ==
                                     Box::Whole(*shard->global_shape);
    PutVarint(&out, whole ? kWholeTensor : kOneBox);
    if (whole) continue;
    PutDims(&out, shard->offsets);
    PutDims(&out, *shard->global_shape);
  }
  PutCrc(&out);
  return out;
}

Result<ShortHeader> DecodeShortHeader(ByteSpan bytes) {
  TC_ASSIGN_OR_RETURN(const ByteSpan body,
                      BinaryBody(bytes, kMagic, "short header"));
  BinaryReader in(body);
  if (in.Varint() != kVersion) return Unsupported("another version");
  const auto crc = in.Bounded(UINT32_MAX);
  const auto data_begin = in.Varint();
  const auto file_bytes = in.Varint();
  auto id = in.String(kMaxNameBytes);
  const auto sharded = in.Bounded(1);
  const auto count = in.Bounded(in.left());
  if (!crc || !data_begin || !file_bytes || !id || !IsId(*id) || !sharded ||
      !count || *data_begin > *file_bytes) {
    return Malformed("its beginning");
  }
  ShortHeader out;
  out.text_crc32c = static_cast<uint32_t>(*crc);
  SafetensorsHeader& header = out.file.header;
  header.data_begin = *data_begin;
  header.file_bytes = *file_bytes;
  out.file.sharding.file_id = std::move(*id);
  out.file.sharding.has_sharding_info = *sharded != 0;
  const auto room = static_cast<size_t>(std::min(*count, kMaxReserved));
  header.tensors.reserve(room);
  if (*sharded) out.file.sharding.entries.reserve(room);
  uint64_t end = 0;
  for (uint64_t i = 0; i < *count; ++i) {
    TC_RETURN_IF_ERROR(ReadTensor(&in, end, &out.file));
    end = header.tensors.back().end;
  }
  if (!in.empty()) return Malformed("bytes behind the last tensor");
  if (end != *file_bytes - *data_begin)
    return Malformed("the size of the file");
  return out;
}

}  // namespace torch_ckpt
