#include "format/ours/catalog.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/budget.h"
#include "base/checked.h"
#include "format/names.h"
#include "format/ours/catalog_builder.h"
#include "format/ours/catalog_codec.h"

namespace torch_ckpt {
namespace {

using internal::EntryField;
using internal::GetFields;
using internal::GetPlacement;
using internal::kCatalogHead;
using internal::kCatalogMagic;
using internal::kCatalogVersion;
using internal::Malformed;

constexpr size_t kMinPlacementBytes = 3;  // every number takes one at least
// What placements of one tensor may take that are decoded: a million, of which
// each is of some bytes and takes hundreds.
constexpr uint64_t kPlacementsAnyway = uint64_t{256} << 20;
// Decoding one, in steps.
constexpr uint64_t kStepsOfPlacement = 8;

uint32_t LoadU32(const std::string& bytes, size_t at) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Whether an object may be in that file: anywhere in one of objects, or in a
// part of one of tensors.
bool MayHold(const ManifestFile& file,
             const std::optional<ArchivedObject>& archived) {
  if (!archived) return file.role == FileRole::kObjects;
  return file.role == FileRole::kData && archived->archive.end <= file.bytes;
}

// A name for a message about an entry that may have none.
Status Named(Status status, const CatalogEntry& entry) {
  return std::move(status).WithTensor(std::string(entry.name));
}

}  // namespace

Result<Catalog> Catalog::Parse(std::string bytes,
                               std::span<const ManifestFile> files) {
  if (bytes.size() > kMaxCatalogBytes)
    return Unsupported("the catalog is larger than 1 GiB");
  TC_ASSIGN_OR_RETURN(const ByteSpan body,
                      BinaryBody(AsBytes(bytes), kCatalogMagic, "catalog"));
  const auto version = static_cast<uint64_t>(body[0]);
  if (version != static_cast<uint64_t>(kCatalogVersion)) {
    return Unsupported("catalog version " + std::to_string(version) +
                       ": written by another torch_ckpt");
  }
  const size_t end = kCatalogMagic.size() + body.size();
  if (end < kCatalogHead) return Malformed("it is cut short");
  const size_t count = LoadU32(bytes, kCatalogMagic.size() + 1);
  if (count > (end - kCatalogHead) / sizeof(uint32_t))
    return Malformed("number of entries");
  const size_t index = kCatalogHead;
  const size_t entries = index + count * sizeof(uint32_t);
  if (count == 0 && entries != end)
    return Malformed("bytes behind the last entry");
  Budget budget("the catalog", bytes.size());
  if (!budget.Keep(count * (sizeof(CatalogEntry) + sizeof(Slice)))) {
    return budget.Over();
  }
  Catalog out;
  out.bytes_ = std::make_shared<const std::string>(std::move(bytes));
  out.entries_.reserve(count);
  out.slices_.reserve(count);
  size_t begin = entries;
  for (size_t i = 0; i < count; ++i) {
    const size_t next =
        i + 1 < count
            ? entries + LoadU32(*out.bytes_, index + (i + 1) * sizeof(uint32_t))
            : end;
    if ((i == 0 && LoadU32(*out.bytes_, index) != 0) || next <= begin ||
        next > end)
      return Malformed("its index");
    TC_RETURN_IF_ERROR(out.ParseEntry(begin, next, files));
    begin = next;
  }
  TC_RETURN_IF_ERROR(out.LinkAliases(&budget));
  return out;
}

Result<Catalog> Catalog::From(CatalogBuilder built,
                              std::span<const ManifestFile> files) {
  TC_ASSIGN_OR_RETURN(std::string encoded, built.Encode());
  built = CatalogBuilder();
  return Parse(std::move(encoded), files);
}

Status Catalog::ParseEntry(size_t begin, size_t end,
                           std::span<const ManifestFile> files) {
  const ByteSpan all = AsBytes(*bytes_);
  BinaryReader in(all.subspan(begin, end - begin));
  const auto kind = in.Bounded(static_cast<uint64_t>(EntryKind::kObject));
  const auto name = in.Text(kMaxNameBytes);
  if (!kind || !name) return Malformed("an entry");
  CatalogEntry entry;
  entry.kind = static_cast<EntryKind>(*kind);
  entry.name = *name;
  if (entry.kind != EntryKind::kObject && !CheckTensorName(*name).ok())
    return Malformed("a name");
  if (!entries_.empty() && entries_.back().name >= entry.name)
    return Named(Malformed("its names do not ascend"), entry);
  bool path_ok = true;
  bool archive_ok = true;
  Status fields = GetFields(&in, [&](uint64_t field, ByteSpan bytes) {
    switch (field) {
      case static_cast<uint64_t>(EntryField::kPath):
        entry.path = AsText(bytes);
        path_ok = IsUtf8(entry.path) && internal::IsPath(entry.path);
        return true;
      case static_cast<uint64_t>(EntryField::kArchive): {
        BinaryReader range(bytes);
        const auto from = range.Varint();
        const auto size = range.Varint();
        const auto leaf = range.empty() ? 0 : range.Varint();
        archive_ok =
            from && size && leaf && range.empty() && CheckedAdd(*from, *size);
        if (archive_ok) {
          entry.archived = {ByteRange::Of(*from, *size), *leaf};
        }
        return true;
      }
      default:
        return false;
    }
  });
  if (!fields.ok()) return Named(std::move(fields), entry);
  if (!path_ok) return Named(Malformed("a path"), entry);
  if (!archive_ok || (entry.archived && entry.kind != EntryKind::kObject))
    return Named(Malformed("an archive"), entry);
  Slice slice;
  switch (entry.kind) {
    case EntryKind::kAlias: {
      const auto of = in.Text(kMaxNameBytes);
      if (!of || !in.empty()) return Named(Malformed("an alias"), entry);
      entry.alias_of = *of;
      break;
    }
    case EntryKind::kObject: {
      const auto file = in.Varint();
      if (!file || !in.empty() || *file >= files.size() ||
          !MayHold(files[*file], entry.archived))
        return Named(Malformed("an object"), entry);
      entry.file = static_cast<uint32_t>(*file);
      break;
    }
    case EntryKind::kTensor: {
      const auto dtype = in.Bounded(kDtypeCount - 1);
      const auto rank = in.Bounded(kMaxDims);
      if (!dtype || !rank) return Named(Malformed("a tensor"), entry);
      const auto shape = in.Sizes(static_cast<int>(*rank));
      const auto count = in.Varint();
      if (!shape || !count || *count > in.left() / kMinPlacementBytes)
        return Named(Malformed("a tensor"), entry);
      entry.dtype = static_cast<Dtype>(*dtype);
      entry.shape = *shape;
      if (!ByteSize(entry.dtype, entry.shape).ok())
        return Named(Malformed("a shape"), entry);
      slice = {end - in.left(), end, *count};
      break;
    }
  }
  slice.tensor = static_cast<uint32_t>(entries_.size());
  entries_.push_back(entry);
  slices_.push_back(slice);
  return {};
}

Status Catalog::LinkAliases(Budget* budget) {
  for (size_t id = 0; id < entries_.size(); ++id) {
    CatalogEntry& entry = entries_[id];
    if (entry.kind != EntryKind::kAlias) continue;
    const int64_t found = Find(entry.alias_of);
    const auto target = static_cast<size_t>(found);
    if (found < 0 || entries_[target].kind != EntryKind::kTensor) {
      return Named(Corrupt("is an alias of '" + std::string(entry.alias_of) +
                           "', which is no tensor of the catalog"),
                   entry);
    }
    // Whoever reads all tensors decodes them for each alias anew.
    if (!budget->Step(kStepsOfPlacement * slices_[target].count)) {
      return Named(budget->Over(), entry);
    }
    entry.dtype = entries_[target].dtype;
    entry.shape = entries_[target].shape;
    slices_[id] = slices_[target];
  }
  return {};
}

int64_t Catalog::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      entries_.begin(), entries_.end(), name,
      [](const CatalogEntry& e, std::string_view n) { return e.name < n; });
  return at != entries_.end() && at->name == name ? at - entries_.begin() : -1;
}

void SortRanges(std::vector<DigestedRange>* ranges) {
  const auto place = [](const DigestedRange& each) {
    return std::pair(each.file, each.range.begin);
  };
  std::sort(ranges->begin(), ranges->end(),
            [&](const DigestedRange& a, const DigestedRange& b) {
              return place(a) < place(b);
            });
  const auto end =
      std::unique(ranges->begin(), ranges->end(),
                  [&](const DigestedRange& a, const DigestedRange& b) {
                    return place(a) == place(b);
                  });
  ranges->erase(end, ranges->end());
}

Result<std::vector<Placement>> Catalog::Placements(
    uint32_t entry, std::span<const ManifestFile> files) const {
  const CatalogEntry& e = entries_[entry];
  const Slice& slice = slices_[entry];
  BinaryReader in(
      AsBytes(bytes()).subspan(slice.begin, slice.end - slice.begin));
  // A few bytes say a placement, which takes hundreds.
  Budget budget("the list of its placements", slice.end - slice.begin,
                kPlacementsAnyway);
  if (!budget.Keep(slice.count * sizeof(Placement))) {
    return Named(budget.Over(), e);
  }
  std::vector<Placement> placements;
  placements.reserve(slice.count);
  size_t owners = 0;
  for (size_t i = 0; i < slice.count; ++i) {
    Result<Placement> placement = GetPlacement(&in, e.dtype, e.shape);
    if (!placement.ok()) return Named(placement.status(), e);
    if (placement->file >= files.size() ||
        files[placement->file].role != FileRole::kData)
      return Named(Malformed("a placement in no file of tensors"), e);
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        internal::PlacementBytes(*placement, e.dtype, e.shape));
    const auto end = CheckedAdd(placement->offset, bytes);
    if (!end || *end > files[placement->file].bytes)
      return Named(Malformed("a placement behind the end of its file"), e);
    owners += placement->role == PlacementRole::kOwner;
    placements.push_back(std::move(placement).value());
  }
  // A rank has a box once, and files of its own.
  if (placements.size() - owners > owners * files.size())
    return Named(Malformed("more replicas than there are ranks"), e);
  if (!in.empty()) return Named(Malformed("bytes behind a placement"), e);
  return placements;
}

Result<Catalog> Catalog::Without(
    const std::set<std::string, std::less<>>& names,
    std::span<const ManifestFile> files) const {
  CatalogBuilder builder;
  TC_RETURN_IF_ERROR(CopyTo(&builder, names, files));
  return From(std::move(builder), files);
}

Status Catalog::CopyTo(CatalogBuilder* builder,
                       const std::set<std::string, std::less<>>& names,
                       std::span<const ManifestFile> files) const {
  std::map<std::string_view, std::string> heirs;  // of tensors that go
  for (uint32_t e = 0; e < entries_.size(); ++e) {
    const CatalogEntry& entry = entries_[e];
    if (names.contains(entry.name)) continue;
    std::string name(entry.name);
    std::string alias_of(entry.alias_of);
    bool heir = false;
    if (entry.kind == EntryKind::kAlias && names.contains(entry.alias_of)) {
      const auto [at, fresh] = heirs.try_emplace(entry.alias_of, name);
      heir = fresh;
      alias_of = at->second;
    }
    const Result<uint32_t> added = [&] {
      if (entry.kind == EntryKind::kObject) {
        return builder->AddObject(std::move(name), entry.file, entry.archived);
      }
      if (entry.kind == EntryKind::kAlias && !heir) {
        return builder->AddAlias(std::move(name), std::move(alias_of));
      }
      return builder->AddTensor(std::move(name), entry.dtype, entry.shape);
    }();
    TC_RETURN_IF_ERROR(added.status());
    builder->SetPath(*added, std::string(entry.path));
    if (entry.kind != EntryKind::kTensor && !heir) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        Placements(e, files));
    builder->SetPlacements(*added, placements);
  }
  return {};
}

Result<Catalog> Catalog::Renamed(
    const std::map<std::string, std::string>& new_names,
    std::span<const ManifestFile> files) const {
  const auto renamed = [&](std::string_view name) {
    const auto found = new_names.find(std::string(name));
    return found == new_names.end() ? std::string(name) : found->second;
  };
  CatalogBuilder builder;
  for (uint32_t e = 0; e < entries_.size(); ++e) {
    const CatalogEntry& entry = entries_[e];
    std::string name = renamed(entry.name);
    const bool same = name == entry.name;
    const Result<uint32_t> added = [&] {
      switch (entry.kind) {
        case EntryKind::kAlias:
          return builder.AddAlias(std::move(name), renamed(entry.alias_of));
        case EntryKind::kObject:
          return builder.AddObject(std::move(name), entry.file, entry.archived);
        case EntryKind::kTensor:
          break;
      }
      return builder.AddTensor(std::move(name), entry.dtype, entry.shape);
    }();
    if (!added.ok()) {
      return InvalidArgument("two tensors would have this name")
          .WithTensor(added.status().tensor());
    }
    if (same) builder.SetPath(*added, std::string(entry.path));
    if (entry.kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        Placements(e, files));
    builder.SetPlacements(*added, placements);
  }
  return From(std::move(builder), files);
}

Result<Catalog> Catalog::InFiles(std::span<const uint32_t> kept,
                                 std::span<const ManifestFile> files,
                                 std::span<const ManifestFile> left) const {
  std::vector<int64_t> numbers(files.size(), -1);
  for (size_t i = 0; i < kept.size(); ++i) {
    numbers[kept[i]] = static_cast<int64_t>(i);
  }
  std::vector<char> stays(entries_.size());
  CatalogBuilder builder;
  for (uint32_t e = 0; e < entries_.size(); ++e) {
    const CatalogEntry& entry = entries_[e];
    if (entry.kind == EntryKind::kAlias) continue;
    std::string name(entry.name);
    if (entry.kind == EntryKind::kObject) {
      const int64_t number = numbers[entry.file];
      if (number < 0) continue;
      TC_ASSIGN_OR_RETURN(
          const uint32_t added,
          builder.AddObject(std::move(name), static_cast<uint32_t>(number),
                            entry.archived));
      builder.SetPath(added, std::string(entry.path));
      continue;
    }
    TC_ASSIGN_OR_RETURN(std::vector<Placement> placements,
                        Placements(e, files));
    size_t inside = 0;
    for (Placement& placement : placements) {
      const int64_t number = numbers[placement.file];
      if (number < 0) continue;
      placement.file = static_cast<uint32_t>(number);
      ++inside;
    }
    if (inside == 0) continue;
    if (inside < placements.size()) {
      return Corrupt("lies in several directories").WithTensor(std::move(name));
    }
    stays[e] = true;
    TC_ASSIGN_OR_RETURN(
        const uint32_t added,
        builder.AddTensor(std::move(name), entry.dtype, entry.shape));
    builder.SetPath(added, std::string(entry.path));
    builder.SetPlacements(added, placements);
  }
  for (uint32_t e = 0; e < entries_.size(); ++e) {
    const CatalogEntry& entry = entries_[e];
    if (entry.kind != EntryKind::kAlias || !stays[TensorOf(e)]) continue;
    TC_ASSIGN_OR_RETURN(
        const uint32_t added,
        builder.AddAlias(std::string(entry.name), std::string(entry.alias_of)));
    builder.SetPath(added, std::string(entry.path));
  }
  return From(std::move(builder), left);
}

}  // namespace torch_ckpt
