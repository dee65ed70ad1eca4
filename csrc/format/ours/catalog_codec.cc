#include "format/ours/catalog_codec.h"

#include <cctype>

#include "base/checked.h"

namespace torch_ckpt::internal {
namespace {

constexpr std::string_view kJsonEscapes = "\"\\/bfnrt";
constexpr size_t kMaxDigits = 19;  // of an integer in a path: 64 bits

// A character of a JSON string from `text[*at]` on, its escape included.
bool SkipJsonChar(std::string_view text, size_t* at) {
  const char c = text[*at];
  if (static_cast<unsigned char>(c) < ' ' || c == '"') return false;
  ++*at;
  if (c != '\\') return true;
  if (*at >= text.size()) return false;
  const char escaped = text[(*at)++];
  if (escaped != 'u') return kJsonEscapes.find(escaped) != kJsonEscapes.npos;
  for (int i = 0; i < 4; ++i, ++*at) {
    if (*at >= text.size() ||
        !std::isxdigit(static_cast<unsigned char>(text[*at])))
      return false;
  }
  return true;
}

StoredKind StoredKindOf(const Placement& placement, const Dims& shape) {
  switch (placement.kind) {
    case PlacementKind::kStridedBox:
      return StoredKind::kStridedBox;
    case PlacementKind::kRange:
      return StoredKind::kRange;
    case PlacementKind::kArchive:
      return StoredKind::kArchive;
    case PlacementKind::kBox:
      break;
  }
  return placement.box == Box::Whole(shape) ? StoredKind::kWhole
                                            : StoredKind::kBox;
}

Result<Placement> Inside(Placement placement, const Dims& shape) {
  if (torch_ckpt::Inside(placement.box, shape)) return placement;
  return Malformed("box " + placement.box.ToString() + " is not inside shape " +
                   shape.ToString());
}

}  // namespace

// Not left to the JSON reader, which takes longer than all else that an entry
// needs.
bool IsPath(std::string_view text) {
  if (!text.starts_with('[')) return false;
  size_t at = 0;
  do {
    ++at;  // '[' or ','
    if (at < text.size() && text[at] == '"') {
      ++at;
      while (at < text.size() && text[at] != '"') {
        if (!SkipJsonChar(text, &at)) return false;
      }
      ++at;  // the closing quote
    } else {
      if (at < text.size() && text[at] == '-') ++at;
      const size_t first = at;
      while (at < text.size() && '0' <= text[at] && text[at] <= '9') ++at;
      const size_t digits = at - first;
      if (digits == 0 || digits > kMaxDigits) return false;
      if (text[first] == '0' && digits > 1) return false;
    }
  } while (at < text.size() && text[at] == ',');
  return at + 1 == text.size() && text[at] == ']';
}

void PutPlacement(std::string* out, const Placement& placement,
                  const Dims& shape) {
  const StoredKind kind = StoredKindOf(placement, shape);
  const bool replica = placement.role == PlacementRole::kReplica;
  PutVarint(out, static_cast<uint64_t>(kind) * 4 + (replica ? kReplicaBit : 0));
  PutVarint(out, placement.file);
  PutVarint(out, placement.offset);
  if (kind == StoredKind::kRange) {
    PutVarint(out, static_cast<uint64_t>(placement.begin));
    PutVarint(out, static_cast<uint64_t>(placement.end - placement.begin));
    return;
  }
  if (kind == StoredKind::kWhole) return;
  if (kind == StoredKind::kArchive) PutVarint(out, placement.bytes);
  PutDims(out, placement.box.offsets);
  PutDims(out, placement.box.sizes);
  if (kind == StoredKind::kStridedBox) PutDims(out, placement.strides);
}

Result<Placement> GetPlacement(BinaryReader* in, Dtype dtype,
                               const Dims& shape) {
  const auto head = in->Varint();
  const auto file = in->Bounded(UINT32_MAX);
  const auto offset = in->Varint();
  if (!head || !file || !offset) return Malformed("a placement");
  Placement placement;
  placement.file = static_cast<uint32_t>(*file);
  placement.offset = *offset;
  if (*head & kReplicaBit) placement.role = PlacementRole::kReplica;
  const auto kind = static_cast<StoredKind>(*head / 4);
  switch (*head / 4) {
    case static_cast<uint64_t>(StoredKind::kWhole):
      placement.box = Box::Whole(shape);
      break;
    case static_cast<uint64_t>(StoredKind::kBox):
    case static_cast<uint64_t>(StoredKind::kStridedBox): {
      const auto offsets = in->Sizes(shape.size());
      const auto sizes = in->Sizes(shape.size());
      if (!offsets || !sizes) return Malformed("a box");
      placement.box = {*offsets, *sizes};
      if (kind == StoredKind::kBox) {
        if (placement.box == Box::Whole(shape))
          return Malformed("a whole box that is not marked as one");
        break;
      }
      const auto strides = in->Sizes(shape.size());
      if (!strides) return Malformed("the strides of a box");
      placement.kind = PlacementKind::kStridedBox;
      placement.strides = *strides;
      break;
    }
    case static_cast<uint64_t>(StoredKind::kArchive): {
      const auto bytes = in->Varint();
      const auto offsets = in->Sizes(shape.size());
      const auto sizes = in->Sizes(shape.size());
      if (!bytes || !offsets || !sizes) return Malformed("an archive");
      placement.kind = PlacementKind::kArchive;
      placement.bytes = *bytes;
      placement.box = {*offsets, *sizes};
      break;
    }
    case static_cast<uint64_t>(StoredKind::kRange): {
      const auto begin = in->Bounded(INT64_MAX);
      const auto count = in->Bounded(INT64_MAX);
      if (!begin || !count) return Malformed("a range");
      const auto end = CheckedAdd(static_cast<int64_t>(*begin),
                                  static_cast<int64_t>(*count));
      if (!end || *end > shape.Product())
        return Malformed("a range behind the end of its tensor");
      placement.kind = PlacementKind::kRange;
      placement.begin = static_cast<int64_t>(*begin);
      placement.end = *end;
      break;
    }
    default:
      return Unsupported("has a placement of kind " +
                         std::to_string(*head / 4) +
                         ", which this torch_ckpt does not know");
  }
  if (*head & kFieldsBit) {
    bool any = false;
    TC_RETURN_IF_ERROR(GetFields(in, [&](uint64_t, ByteSpan) {
      any = true;
      return false;
    }));
    if (!any) return Malformed("a placement without the fields that it has");
  }
  TC_RETURN_IF_ERROR(PlacementBytes(placement, dtype, shape).status());
  if (placement.kind == PlacementKind::kRange) return placement;
  return Inside(std::move(placement), shape);
}

Result<uint64_t> PlacementBytes(const Placement& placement, Dtype dtype,
                                const Dims& shape) {
  switch (placement.kind) {
    case PlacementKind::kBox: {
      const auto bytes = ByteSize(dtype, placement.box.sizes);
      if (!bytes.ok()) return Malformed("the size of a box");
      return *bytes;
    }
    case PlacementKind::kRange: {
      const Unit unit = DtypeUnit(dtype);
      const auto bytes = ByteSize(dtype, {placement.end - placement.begin});
      if (!bytes.ok() || placement.begin % unit.elements != 0)
        return Malformed("the size of a range");
      return *bytes;
    }
    case PlacementKind::kArchive:
      return placement.bytes;
    case PlacementKind::kStridedBox:
      break;
  }
  if (!torch_ckpt::Inside(placement.box, shape))
    return Malformed("a box outside its tensor");
  const auto view = InUnits(dtype, shape, placement.box);
  if (!view.ok() || view->shape.size() != placement.strides.size())
    return Malformed("the strides of a box");
  if (view->box.Empty()) return uint64_t{0};
  auto bytes = static_cast<uint64_t>(view->unit_bytes);
  for (int d = 0; d < placement.strides.size(); ++d) {
    const auto steps = CheckedMul(static_cast<uint64_t>(view->box.sizes[d] - 1),
                                  static_cast<uint64_t>(placement.strides[d]));
    const auto sum = steps ? CheckedAdd(bytes, *steps) : steps;
    if (!sum) return Malformed("the strides of a box");
    bytes = *sum;
  }
  return bytes;
}

}  // namespace torch_ckpt::internal
