// Catalogs of version 1, which no save writes any more: entries in any order, a
// list of the files, and boxes only.
#include <algorithm>
#include <utility>
#include <vector>

#include "format/catalog_codec.h"
#include "format/names.h"

namespace torch_ckpt::internal {
namespace {

constexpr unsigned kReplica = 1;  // of a placement's flags
constexpr unsigned kWhole = 2;    // the box is the whole shape; not written

// Their positions among `files`, which must say the same of each.
Result<std::vector<uint32_t>> ReadFiles(BinaryReader* in,
                                        std::span<const ManifestFile> files) {
  const FilesByName by_name(files);
  const auto count = in->Bounded(in->left());
  if (!count) return Malformed("number of files");
  std::vector<uint32_t> positions;
  for (uint64_t i = 0; i < *count; ++i) {
    const auto name = in->Text(kMaxNameBytes);
    const auto id = in->Text(kMaxNameBytes);
    const auto bytes = in->Varint();
    if (!name || !id || !bytes) return Malformed("a file");
    const int64_t at = by_name.Find(*name);
    if (at < 0 || files[static_cast<size_t>(at)].id != *id ||
        files[static_cast<size_t>(at)].bytes != *bytes) {
      return Corrupt("catalog and manifest disagree about " +
                     std::string(*name));
    }
    positions.push_back(static_cast<uint32_t>(at));
  }
  std::vector<uint32_t> sorted = positions;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    return Malformed("a file stands twice");
  return positions;
}

Result<Placement> ReadPlacement(BinaryReader* in, const Dims& shape,
                                const std::vector<uint32_t>& positions) {
  const auto flags = in->Bounded(kReplica | kWhole);
  const auto file = in->Varint();
  const auto offset = in->Varint();
  if (!flags || !file || !offset || *file >= positions.size())
    return Malformed("a placement");
  Placement placement;
  placement.file = positions[*file];
  placement.offset = *offset;
  if (*flags & kReplica) placement.role = PlacementRole::kReplica;
  if (*flags & kWhole) {
    placement.box = Box::Whole(shape);
    return placement;
  }
  const auto offsets = in->Sizes(shape.size());
  const auto sizes = in->Sizes(shape.size());
  if (!offsets || !sizes) return Malformed("a box");
  placement.box = {*offsets, *sizes};
  return placement;
}

Status ReadEntry(BinaryReader* in, const std::vector<uint32_t>& positions,
                 CatalogBuilder* out) {
  const auto kind = in->Bounded(static_cast<uint64_t>(EntryKind::kObject));
  auto name = in->String(kMaxNameBytes);
  const auto stored = in->Bounded(kDtypeCount - 1);
  const auto meant = in->Bounded(kDtypeCount - 1);
  const auto fill = in->Bounded(0);
  const auto rank = in->Bounded(kMaxDims);
  // Two dtypes of one entry were foreseen, and never written.
  if (!kind || !name || !stored || !meant || *stored != *meant || !fill ||
      !rank)
    return Malformed("an entry");
  const auto shape = in->Sizes(static_cast<int>(*rank));
  auto alias_of = in->String(kMaxNameBytes);
  auto path = in->String(in->left());
  const auto count = in->Bounded(in->left());
  if (!shape || !alias_of || !path || !count) return Malformed("an entry");
  std::vector<Placement> placements;
  for (uint64_t i = 0; i < *count; ++i) {
    TC_ASSIGN_OR_RETURN(placements.emplace_back(),
                        ReadPlacement(in, *shape, positions));
  }
  Result<uint32_t> added = uint32_t{0};
  switch (static_cast<EntryKind>(*kind)) {
    case EntryKind::kTensor:
      if (!alias_of->empty()) return Malformed("an alias");
      if (!ByteSize(static_cast<Dtype>(*stored), *shape).ok())
        return Malformed("a shape");
      added =
          out->AddTensor(std::move(*name), static_cast<Dtype>(*stored), *shape);
      break;
    case EntryKind::kAlias:
      if (!placements.empty()) return Malformed("an alias");
      added = out->AddAlias(std::move(*name), std::move(*alias_of));
      break;
    case EntryKind::kObject:
      if (placements.size() != 1 || !shape->empty() ||
          placements[0].role != PlacementRole::kOwner)
        return Malformed("an object").WithTensor(std::move(*name));
      added = out->AddObject(std::move(*name), placements[0].file);
      placements.clear();
      break;
  }
  if (!added.ok()) return added.status();
  out->SetPath(*added, std::move(*path));
  for (const Placement& placement : placements) {
    TC_RETURN_IF_ERROR(out->AddPlacement(*added, placement));
  }
  return {};
}

}  // namespace

Result<CatalogBuilder> ReadCatalogV1(BinaryReader in,
                                     std::span<const ManifestFile> files) {
  TC_ASSIGN_OR_RETURN(const std::vector<uint32_t> positions,
                      ReadFiles(&in, files));
  const auto count = in.Bounded(in.left());
  if (!count) return Malformed("number of entries");
  CatalogBuilder out;
  for (uint64_t i = 0; i < *count; ++i) {
    TC_RETURN_IF_ERROR(ReadEntry(&in, positions, &out));
  }
  if (!in.empty()) return Malformed("bytes behind the last entry");
  return out;
}

}  // namespace torch_ckpt::internal
