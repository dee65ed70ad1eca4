#include <algorithm>
#include <map>
#include <unordered_map>

#include "engine/merge_job.h"
#include "format/names.h"
#include "format/sharding_info.h"
#include "plan/layout.h"

namespace torch_ckpt {
namespace {

// Output file index -> catalog entries, by index.
Result<std::map<int64_t, std::vector<uint32_t>>> Assign(
    const Catalog& catalog, const MergeOptions& options) {
  std::map<int64_t, std::vector<uint32_t>> files;
  std::unordered_map<std::string_view, int64_t> wanted;
  static const std::vector<std::pair<std::string, int64_t>> kNone;
  const auto& mapping = options.mapping ? *options.mapping : kNone;
  for (const auto& [name, index] : mapping) {
    if (index < 1 || index > 99999) {
      return InvalidArgument("maps to file " + std::to_string(index) +
                             "; indices are 1 to 99999")
          .WithTensor(name);
    }
    wanted.emplace(name, index);
  }
  size_t used = 0;
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    const CatalogEntry& entry = catalog.entries()[e];
    if (entry.kind != EntryKind::kTensor) continue;
    int64_t index = 1;
    if (options.mapping) {
      const auto it = wanted.find(entry.name);
      if (it == wanted.end()) {
        if (!options.strict) continue;
        return Incomplete(
                   "is in the checkpoint but not in the mapping; "
                   "strict=False would leave it out")
            .WithTensor(entry.name);
      }
      ++used;
      index = it->second;
    }
    files[index].push_back(e);
  }
  if (options.strict && used != wanted.size()) {
    for (const auto& [name, index] : mapping) {
      const int64_t id = catalog.Find(name);
      if (id < 0 || catalog.entries()[static_cast<size_t>(id)].kind !=
                        EntryKind::kTensor) {
        return Incomplete("is in the mapping but not in the checkpoint")
            .WithTensor(name);
      }
    }
  }
  return files;
}

}  // namespace

Result<MergePlan> MergePlan::Make(std::shared_ptr<const Checkpoint> checkpoint,
                                  MergeOptions options,
                                  std::vector<std::string> ids) {
  const Catalog& catalog = checkpoint->catalog();
  TC_ASSIGN_OR_RETURN(const auto files, Assign(catalog, options));
  if (files.empty()) {
    return Incomplete("holds no tensor").WithFile(checkpoint->path());
  }
  int64_t count = files.rbegin()->first;
  if (options.mapping) {
    for (const auto& [name, index] : *options.mapping) {
      count = std::max(count, index);
    }
  }
  MergePlan plan;
  size_t next_id = 0;
  const auto take_id = [&]() {
    if (next_id == ids.size()) ids.push_back(NewId());
    return ids[next_id++];
  };
  for (const auto& [index, members] : files) {
    Layout layout;
    std::vector<SafetensorsEntry> entries;
    for (uint32_t e : members) {
      const CatalogEntry& entry = catalog.entries()[e];
      entries.push_back({entry.name, entry.storage_dtype, entry.shape, 0, 0});
    }
    const std::vector<uint32_t> order = LayOutFile(&entries);
    const std::string id = take_id();
    TC_ASSIGN_OR_RETURN(
        layout.header,
        BuildSafetensorsHeader(
            BuildFileMetadata(id, entries, /*shards=*/nullptr), entries));
    layout.extents.push_back({0, layout.header.size(), Extent::kHeader, 0});
    for (size_t i = 0; i < order.size(); ++i) {
      if (entries[i].begin == entries[i].end) continue;
      layout.extents.push_back({layout.header.size() + entries[i].begin,
                                layout.header.size() + entries[i].end,
                                Extent::kTensor, members[order[i]]});
    }
    const std::string name = FinalFileName(index, count);
    plan.outputs_.push_back({name, StagedName(name, id), id, FileRole::kData,
                             layout.extents.back().end});
    plan.layouts_.push_back(std::move(layout));
  }
  for (const auto& [index, entries] : files) {
    plan.entries_.insert(plan.entries_.end(), entries.begin(), entries.end());
  }
  // Leaves that are no tensors go along.
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    if (catalog.entries()[e].kind == EntryKind::kObject) {
      plan.entries_.push_back(e);
    }
  }
  for (uint32_t f = 0; f < catalog.files().size(); ++f) {
    const CatalogFile& file = catalog.files()[f];
    const ManifestFile* listed = checkpoint->manifest()
                                     ? checkpoint->manifest()->Find(file.name)
                                     : nullptr;
    if (!listed || listed->role != FileRole::kObjects) continue;
    Layout layout;
    if (file.bytes > 0) {
      layout.extents.push_back({0, file.bytes, Extent::kFile, f});
    }
    const std::string id = take_id();
    plan.outputs_.push_back({file.name, StagedName(file.name, id), id,
                             FileRole::kObjects, file.bytes});
    plan.layouts_.push_back(std::move(layout));
  }
  if (next_id != ids.size()) {
    return InvalidArgument(
        "the merge plan of this rank has another number of "
        "files than the coordinator's");
  }
  options.output.fill_bytes = kPieceBytes;
  options.output.scratch_bytes = kPieceBytes + 2 * 4096;
  plan.checkpoint_ = std::move(checkpoint);
  plan.options_ = std::move(options);
  return plan;
}

}  // namespace torch_ckpt
