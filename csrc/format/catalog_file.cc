// The catalog file: EncodeCatalog and DecodeCatalog of format/catalog.h.
#include <algorithm>
#include <cctype>

#include "base/checked.h"
#include "format/binary.h"
#include "format/catalog.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kMagic = "TCKPTCAT";
constexpr uint64_t kVersion = 1;
constexpr unsigned kReplicaBit = 1;  // of a placement's flags
constexpr unsigned kWholeBit = 2;    // the box is the whole shape; not written
constexpr std::string_view kJsonEscapes = "\"\\/bfnrt";
constexpr size_t kMinEntryBytes = 9;  // every field takes one at least
constexpr size_t kMaxDigits = 19;     // of an integer in a path: 64 bits

Status Malformed(const char* what) {
  return Corrupt(std::string("the catalog is damaged: ") + what);
}

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

// A state-dict path: a JSON array of one or more strings and integers, without
// white space. Not left to the JSON reader, which takes longer than all else
// that an entry needs.
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

Status ReadFiles(BinaryReader* in, Catalog* out) {
  const auto count = in->Bounded(in->left());
  if (!count) return Malformed("number of files");
  for (uint64_t i = 0; i < *count; ++i) {
    auto name = in->String(kMaxNameBytes);
    auto id = in->String(kMaxNameBytes);
    const auto bytes = in->Varint();
    if (!name || !id || !bytes) return Malformed("a file");
    TC_RETURN_IF_ERROR(CheckFileName(*name));
    if (!id->empty() && !IsId(*id)) return Malformed("a file id");
    out->AddFile({std::move(*name), std::move(*id), *bytes});
  }
  std::vector<std::string_view> names;
  for (const CatalogFile& file : out->files()) names.push_back(file.name);
  if (FindDuplicate(names)) return Malformed("a file stands twice");
  return {};
}

Status ReadPlacement(BinaryReader* in, uint32_t entry, Catalog* out) {
  const CatalogEntry& e = out->entries()[entry];
  const auto flags = in->Bounded(kReplicaBit | kWholeBit);
  const auto file = in->Varint();
  const auto offset = in->Varint();
  if (!flags || !file || !offset || *file >= out->files().size())
    return Malformed("a placement");
  Placement placement;
  placement.file = static_cast<uint32_t>(*file);
  placement.offset = *offset;
  if (*flags & kReplicaBit) placement.role = PlacementRole::kReplica;
  if (*flags & kWholeBit) {
    placement.box = Box::Whole(e.shape);
  } else {
    const auto offsets = in->Sizes(e.shape.size());
    const auto sizes = in->Sizes(e.shape.size());
    if (!offsets || !sizes) return Malformed("a box");
    placement.box = {*offsets, *sizes};
    if (placement.box == Box::Whole(e.shape))
      return Malformed("a whole box that is not marked as one");
  }
  const auto bytes = ByteSize(e.storage_dtype, placement.box.sizes);
  if (!bytes.ok()) return Malformed("the size of a box");
  const auto end = CheckedAdd(placement.offset, *bytes);
  if (!end || *end > out->files()[placement.file].bytes)
    return Malformed("a box behind the end of its file");
  return out->AddPlacement(entry, placement);
}

Status ReadEntry(BinaryReader* in, Catalog* out) {
  const auto kind = in->Bounded(static_cast<uint64_t>(EntryKind::kObject));
  auto name = in->String(kMaxNameBytes);
  const auto storage = in->Bounded(kDtypeCount - 1);
  const auto logical = in->Bounded(kDtypeCount - 1);
  const auto fill = in->Bounded(static_cast<uint64_t>(FillPolicy::kNone));
  const auto rank = in->Bounded(kMaxDims);
  if (!kind || !name || !storage || !logical || !fill || !rank)
    return Malformed("an entry");
  const bool is_object = *kind == static_cast<uint64_t>(EntryKind::kObject);
  if (!is_object && !CheckTensorName(*name).ok()) return Malformed("a name");
  const auto shape = in->Sizes(static_cast<int>(*rank));
  auto alias_of = in->String(kMaxNameBytes);
  auto path = in->String(in->left());
  const auto count = in->Bounded(in->left());
  if (!shape || !alias_of || !path || !count) return Malformed("an entry");
  if (!path->empty() && !IsPath(*path)) return Malformed("a path");

  CatalogEntry entry;
  entry.name = std::move(*name);
  entry.kind = static_cast<EntryKind>(*kind);
  entry.storage_dtype = static_cast<Dtype>(*storage);
  entry.logical_dtype = static_cast<Dtype>(*logical);
  entry.fill = static_cast<FillPolicy>(*fill);
  entry.shape = *shape;
  entry.alias_of = std::move(*alias_of);
  entry.path = std::move(*path);
  if (!ByteSize(entry.storage_dtype, entry.shape).ok())
    return Malformed("a shape");
  if (entry.kind == EntryKind::kAlias ? *count != 0 : !entry.alias_of.empty())
    return Malformed("an alias");
  if (is_object && (*count != 1 || entry.shape.size() != 0))
    return Malformed("an object").WithTensor(entry.name);
  TC_ASSIGN_OR_RETURN(const uint32_t id, out->AddEntry(std::move(entry)));
  for (uint64_t i = 0; i < *count; ++i)
    TC_RETURN_IF_ERROR(ReadPlacement(in, id, out));
  if (is_object && out->placements(id)[0].role != PlacementRole::kOwner)
    return Malformed("an object").WithTensor(out->entries()[id].name);
  return {};
}

}  // namespace

std::string EncodeCatalog(const Catalog& catalog) {
  std::string out(kMagic);
  PutVarint(&out, kVersion);
  PutVarint(&out, catalog.files().size());
  for (const CatalogFile& file : catalog.files()) {
    PutString(&out, file.name);
    PutString(&out, file.id);
    PutVarint(&out, file.bytes);
  }
  PutVarint(&out, catalog.entries().size());
  for (uint32_t id = 0; id < catalog.entries().size(); ++id) {
    const CatalogEntry& e = catalog.entries()[id];
    PutVarint(&out, static_cast<uint64_t>(e.kind));
    PutString(&out, e.name);
    PutVarint(&out, static_cast<uint64_t>(e.storage_dtype));
    PutVarint(&out, static_cast<uint64_t>(e.logical_dtype));
    PutVarint(&out, static_cast<uint64_t>(e.fill));
    PutVarint(&out, static_cast<uint64_t>(e.shape.size()));
    PutDims(&out, e.shape);
    PutString(&out, e.alias_of);
    PutString(&out, e.path);
    // Those of an alias are its tensor's.
    const auto placements = e.kind == EntryKind::kAlias
                                ? std::span<const Placement>()
                                : catalog.placements(id);
    PutVarint(&out, placements.size());
    for (const Placement& p : placements) {
      const bool whole = p.box == Box::Whole(e.shape);
      PutVarint(&out, (p.role == PlacementRole::kReplica ? kReplicaBit : 0u) |
                          (whole ? kWholeBit : 0u));
      PutVarint(&out, p.file);
      PutVarint(&out, p.offset);
      if (whole) continue;
      PutDims(&out, p.box.offsets);
      PutDims(&out, p.box.sizes);
    }
  }
  PutCrc(&out);
  return out;
}

Result<Catalog> DecodeCatalog(ByteSpan bytes) {
  if (bytes.size() > kMaxCatalogBytes)
    return Unsupported("the catalog is larger than 1 GiB");
  TC_ASSIGN_OR_RETURN(const ByteSpan body,
                      BinaryBody(bytes, kMagic, "catalog"));
  BinaryReader in(body);
  const auto version = in.Varint();
  if (!version || *version == 0) return Malformed("version");
  if (*version > kVersion) {
    return Unsupported("catalog version " + std::to_string(*version) +
                       ": written by a newer torch_ckpt");
  }
  Catalog out;
  TC_RETURN_IF_ERROR(ReadFiles(&in, &out));
  const auto count = in.Bounded(in.left());
  if (!count) return Malformed("number of entries");
  // Not more than the bytes can hold.
  out.ReserveEntries(std::min<uint64_t>(*count, in.left() / kMinEntryBytes));
  for (uint64_t i = 0; i < *count; ++i)
    TC_RETURN_IF_ERROR(ReadEntry(&in, &out));
  if (!in.empty()) return Malformed("bytes behind the last entry");
  TC_RETURN_IF_ERROR(out.LinkAliases());
  return out;
}

}  // namespace torch_ckpt
