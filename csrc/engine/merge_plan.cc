#include "engine/merge_plan.h"

#include <map>
#include <set>

#include "engine/final_files.h"
#include "format/cast.h"
#include "format/names.h"
#include "os/byte_source.h"

namespace torch_ckpt {
namespace {

Result<Dtype> OutputDtype(const CatalogEntry& entry,
                          const MergeOptions& options) {
  const auto wanted = options.dtypes.find(entry.name);
  if (wanted == options.dtypes.end()) return entry.dtype;
  if (wanted->second == entry.dtype || CanCast(entry.dtype, wanted->second)) {
    return wanted->second;
  }
  return InvalidArgument(std::string("is ") + DtypeName(entry.dtype) +
                         ", which is not cast to " + DtypeName(wanted->second))
      .WithTensor(std::string(entry.name));
}

// Output file index -> catalog entries, by index.
struct Assigned {
  std::map<int64_t, std::vector<uint32_t>> files;
  int64_t count = 1;
};

Result<Assigned> Assign(const Catalog& catalog, const MergeOptions& options) {
  std::vector<uint32_t> tensors;
  std::vector<std::string_view> names;
  std::vector<uint64_t> bytes;
  std::set<std::string_view> mapped;
  if (options.files.mapping) {
    for (const auto& [name, index] : *options.files.mapping) {
      mapped.insert(name);
    }
  }
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    const CatalogEntry& entry = catalog.entries()[e];
    if (entry.kind == EntryKind::kObject) continue;
    if (entry.kind == EntryKind::kAlias && !mapped.count(entry.name)) continue;
    TC_ASSIGN_OR_RETURN(const Dtype dtype, OutputDtype(entry, options));
    TC_ASSIGN_OR_RETURN(const uint64_t size, ByteSize(dtype, entry.shape));
    tensors.push_back(e);
    names.push_back(entry.name);
    bytes.push_back(size);
  }
  TC_ASSIGN_OR_RETURN(const FileDivision division,
                      DivideIntoFiles(names, bytes, options.files));
  Assigned assigned;
  assigned.count = division.count;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t index = division.index[i];
    if (index != 0) {
      assigned.files[index].push_back(tensors[i]);
    } else if (options.strict) {
      return Incomplete(
                 "is in the checkpoint but not in the mapping; "
                 "strict=False would leave it out")
          .WithTensor(std::string(names[i]));
    }
  }
  if (!options.strict || !options.files.mapping) return assigned;
  for (const auto& [name, index] : *options.files.mapping) {
    const int64_t id = catalog.Find(name);
    if (id < 0 ||
        catalog.entries()[static_cast<size_t>(id)].kind == EntryKind::kObject) {
      return Incomplete("is in the mapping but not in the checkpoint")
          .WithTensor(name);
    }
  }
  return assigned;
}

}  // namespace

Result<MergePlan> MergePlan::Make(std::shared_ptr<const Checkpoint> checkpoint,
                                  MergeOptions options,
                                  std::vector<std::string> ids) {
  const Catalog& catalog = checkpoint->catalog();
  TC_ASSIGN_OR_RETURN(const Assigned assigned, Assign(catalog, options));
  if (assigned.files.empty()) {
    return Incomplete("holds no tensor").WithFile(checkpoint->path());
  }
  std::vector<OutputSpec> outputs;
  std::vector<Layout> layouts;
  std::vector<uint32_t> kept;
  size_t next_id = 0;
  const auto take_id = [&]() {
    if (next_id == ids.size()) ids.push_back(NewId());
    return ids[next_id++];
  };
  for (const auto& [index, members] : assigned.files) {
    std::vector<SafetensorsEntry> entries;
    for (uint32_t e : members) {
      const CatalogEntry& entry = catalog.entries()[e];
      TC_ASSIGN_OR_RETURN(const Dtype dtype, OutputDtype(entry, options));
      entries.push_back({std::string(entry.name), dtype, entry.shape, 0, 0});
    }
    TC_ASSIGN_OR_RETURN(
        FinalLayout file,
        LayOutFinalFile(FinalFileName(index, assigned.count, options.naming),
                        take_id(), std::move(entries)));
    Layout layout;
    const uint64_t data = file.header.size();
    layout.extents.push_back({0, data, Extent::kHeader, 0, 0, {}});
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const SafetensorsEntry& tensor = file.tensors[i];
      if (tensor.begin == tensor.end) continue;
      const uint32_t e = members[file.order[i]];
      Extent extent{
          data + tensor.begin, data + tensor.end, Extent::kTensor, e, 0, {}};
      if (catalog.entries()[e].dtype != tensor.dtype) {
        extent.cast = tensor.dtype;
      }
      layout.extents.push_back(extent);
    }
    layout.header = std::move(file.header);
    outputs.push_back(std::move(file.spec));
    layouts.push_back(std::move(layout));
    kept.insert(kept.end(), members.begin(), members.end());
  }
  // Leaves that are no tensors go along, and aliases of what is there.
  const std::set<uint32_t> stored(kept.begin(), kept.end());
  std::vector<uint32_t> aliases;
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    const CatalogEntry& entry = catalog.entries()[e];
    if (entry.kind == EntryKind::kObject) kept.push_back(e);
    if (entry.kind != EntryKind::kAlias || stored.count(e)) continue;
    const auto of = static_cast<uint32_t>(catalog.Find(entry.alias_of));
    if (stored.count(of)) aliases.push_back(e);
  }
  for (uint32_t f = 0; f < checkpoint->files().size(); ++f) {
    const ManifestFile& file = checkpoint->files()[f];
    if (file.role != FileRole::kObjects) continue;
    Layout layout;
    if (file.bytes > 0) {
      layout.extents.push_back({0, file.bytes, Extent::kFile, f, 0, {}});
    }
    const std::string id = take_id();
    outputs.push_back({file.name,
                       StagedName(file.name, id),
                       id,
                       FileRole::kObjects,
                       file.bytes,
                       {}});
    layouts.push_back(std::move(layout));
  }
  if (next_id != ids.size()) {
    return InvalidArgument(
        "the merge plan of this rank has another number of "
        "files than the coordinator's");
  }
  MergePlan plan = OfExtents(std::move(checkpoint), std::move(options),
                             std::move(outputs), std::move(layouts));
  plan.entries_ = std::move(kept);
  plan.aliases_ = std::move(aliases);
  plan.index_name_ = IndexFileName(assigned.count, plan.options_.naming);
  return plan;
}

MergePlan MergePlan::OfExtents(std::shared_ptr<const Checkpoint> checkpoint,
                               MergeOptions options,
                               std::vector<OutputSpec> outputs,
                               std::vector<Layout> layouts) {
  MergePlan plan;
  options.output.fill_bytes = kPieceBytes;
  options.output.scratch_bytes = kPieceBytes + ByteSource::kSlack;
  if (!options.dtypes.empty()) options.output.scratch_bytes += kPieceBytes;
  plan.checkpoint_ = std::move(checkpoint);
  plan.options_ = std::move(options);
  plan.outputs_ = std::move(outputs);
  plan.layouts_ = std::move(layouts);
  return plan;
}

Result<std::vector<std::string>> KeptInPlace(const MergePlan& plan) {
  const Checkpoint& input = plan.checkpoint();
  if (!input.manifest()) return std::vector<std::string>();
  std::set<std::string> keep;
  for (const ManifestFile& file : input.files()) {
    if (file.role == FileRole::kObjects || file.role == FileRole::kExtra ||
        (file.role == FileRole::kData && IsShardName(file.name))) {
      keep.insert(file.name);
    }
  }
  const std::vector<CatalogEntry>& entries = input.catalog().entries();
  const std::set<uint32_t> merged(plan.entries().begin(), plan.entries().end());
  for (uint32_t e = 0; e < entries.size(); ++e) {
    if (merged.contains(e) || entries[e].kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        input.Placements(e));
    for (const Placement& placement : placements) {
      keep.insert(input.files()[placement.file].name);
    }
  }
  return std::vector<std::string>(keep.begin(), keep.end());
}

}  // namespace torch_ckpt
