// The catalog file: EncodeCatalog and DecodeCatalog of format/catalog.h.
#include <cstring>
#include <optional>

#include "base/checked.h"
#include "format/catalog.h"
#include "format/names.h"
#include "format/safetensors.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kMagic = "TCKPTCAT";
constexpr uint64_t kVersion = 1;
constexpr size_t kCrcBytes = 4;
constexpr size_t kMaxCatalogBytes = size_t{1} << 30;
constexpr unsigned kReplicaBit = 1;  // of a placement's flags
constexpr unsigned kWholeBit = 2;    // the box is the whole shape; not written

void PutVarint(std::string* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>((value & 0x7f) | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void PutString(std::string* out, std::string_view text) {
  PutVarint(out, text.size());
  *out += text;
}

void PutDims(std::string* out, const Dims& dims) {
  for (int64_t value : dims) PutVarint(out, static_cast<uint64_t>(value));
}

// Every Get returns nothing once the bytes do not hold what it wants; nothing
// is allocated that is larger than what is left.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }
  size_t left() const { return left_.size(); }

  // LEB128 in its shortest form only, so that one catalog is one byte string.
  std::optional<uint64_t> Varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !left_.empty(); shift += 7) {
      const auto byte = static_cast<uint64_t>(left_.front());
      left_ = left_.subspan(1);
      const uint64_t bits = byte & 0x7f;
      if (shift == 63 && bits > 1) return std::nullopt;
      value |= bits << shift;
      if (byte & 0x80) continue;
      if (byte == 0 && shift > 0) return std::nullopt;
      return value;
    }
    return std::nullopt;
  }

  // At most `limit`.
  std::optional<uint64_t> Bounded(uint64_t limit) {
    const auto value = Varint();
    return value && *value <= limit ? value : std::nullopt;
  }

  std::optional<std::string> String(size_t limit) {
    const auto size = Bounded(limit);
    if (!size || *size > left_.size()) return std::nullopt;
    std::string text(AsText(left_.first(*size)));
    left_ = left_.subspan(*size);
    if (!IsUtf8(text)) return std::nullopt;
    return text;
  }

  std::optional<Dims> Sizes(int rank) {
    Dims dims;
    for (int d = 0; d < rank; ++d) {
      const auto value = Bounded(static_cast<uint64_t>(kMaxDimension));
      if (!value) return std::nullopt;
      dims.push_back(static_cast<int64_t>(*value));
    }
    return dims;
  }

 private:
  ByteSpan left_;
};

Status Malformed(const char* what) {
  return Corrupt(std::string("the catalog is damaged: ") + what);
}

Status ReadFiles(Reader* in, Catalog* out) {
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

Status ReadPlacement(Reader* in, uint32_t entry, Catalog* out) {
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

Status ReadEntry(Reader* in, Catalog* out) {
  const auto kind = in->Bounded(static_cast<uint64_t>(EntryKind::kObject));
  auto name = in->String(kMaxNameBytes);
  const auto storage = in->Bounded(kDtypeCount - 1);
  const auto logical = in->Bounded(kDtypeCount - 1);
  const auto fill = in->Bounded(static_cast<uint64_t>(FillPolicy::kNone));
  const auto rank = in->Bounded(kMaxDims);
  if (!kind || !name || !storage || !logical || !fill || !rank)
    return Malformed("an entry");
  if (name->find('\0') != std::string::npos) return Malformed("a name");
  const auto shape = in->Sizes(static_cast<int>(*rank));
  auto alias_of = in->String(kMaxNameBytes);
  auto path = in->String(in->left());
  const auto count = in->Bounded(in->left());
  if (!shape || !alias_of || !path || !count) return Malformed("an entry");

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
  TC_ASSIGN_OR_RETURN(const uint32_t id, out->AddEntry(std::move(entry)));
  for (uint64_t i = 0; i < *count; ++i)
    TC_RETURN_IF_ERROR(ReadPlacement(in, id, out));
  return {};
}

Status CheckAliases(const Catalog& catalog) {
  for (const CatalogEntry& entry : catalog.entries()) {
    if (entry.kind != EntryKind::kAlias) continue;
    const int64_t target = catalog.Find(entry.alias_of);
    if (target < 0 || catalog.entries()[static_cast<size_t>(target)].kind !=
                          EntryKind::kTensor) {
      return Corrupt("is an alias of '" + entry.alias_of +
                     "', which is no tensor of the catalog")
          .WithTensor(entry.name);
    }
  }
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
    PutVarint(&out, catalog.placements(id).size());
    for (const Placement& p : catalog.placements(id)) {
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
  const uint32_t crc = Crc32c(0, out.data(), out.size());
  char raw[kCrcBytes];
  std::memcpy(raw, &crc, sizeof raw);
  out.append(raw, sizeof raw);
  return out;
}

Result<Catalog> DecodeCatalog(ByteSpan bytes) {
  if (bytes.size() > kMaxCatalogBytes)
    return Unsupported("the catalog is larger than 1 GiB");
  if (bytes.size() < kMagic.size() + 1 + kCrcBytes ||
      !AsText(bytes).starts_with(kMagic))
    return Corrupt("this is no catalog file");
  const ByteSpan body = bytes.first(bytes.size() - kCrcBytes);
  uint32_t crc;
  std::memcpy(&crc, bytes.data() + body.size(), sizeof crc);
  if (crc != Crc32c(0, body.data(), body.size()))
    return Malformed("the checksum does not match");

  Reader in(body.subspan(kMagic.size()));
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
  for (uint64_t i = 0; i < *count; ++i)
    TC_RETURN_IF_ERROR(ReadEntry(&in, &out));
  if (!in.empty()) return Malformed("bytes behind the last entry");
  TC_RETURN_IF_ERROR(CheckAliases(out));
  return out;
}

}  // namespace torch_ckpt
