#include "engine/merge/merge_plan.h"

#include <map>
#include <set>

#include "engine/merge/cut_objects.h"
#include "engine/save/final_files.h"
#include "format/json.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

Result<Dtype> OutputDtype(const Checkpoint& checkpoint, uint32_t e,
                          const MergeOptions& options) {
  const auto wanted =
      options.dtypes.find(checkpoint.catalog().entries()[e].name);
  const Dtype dtype = wanted == options.dtypes.end() ? UsualDtype(checkpoint, e)
                                                     : wanted->second;
  TC_RETURN_IF_ERROR(CheckConverts(checkpoint, e, dtype));
  return dtype;
}

// Output file index -> catalog entries, by index.
struct Assigned {
  std::map<int64_t, std::vector<uint32_t>> files;
  int64_t count = 1;
};

Result<Assigned> Assign(const Checkpoint& checkpoint,
                        const MergeOptions& options) {
  const Catalog& catalog = checkpoint.catalog();
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
    TC_ASSIGN_OR_RETURN(const Dtype dtype, OutputDtype(checkpoint, e, options));
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

MergePlan::Sources::Sources(const std::shared_ptr<const Checkpoint>& checkpoint,
                            const MergeOptions& options)
    : inputs(checkpoint->LendFiles(options.output.direct_io), options.verify,
             std::max(1, options.output.workers)),
      tensors(checkpoint, &inputs),
      files(&inputs) {}

MergePlan::MergePlan(std::shared_ptr<const Checkpoint> checkpoint,
                     MergeOptions options)
    : checkpoint_(std::move(checkpoint)),
      options_(std::move(options)),
      sources_(std::make_unique<Sources>(checkpoint_, options_)) {}

// A file of tensors: entries of the catalog.
Status MergePlan::AddFile(std::string name, std::string id,
                          const std::vector<uint32_t>& members) {
  const std::vector<CatalogEntry>& catalog = checkpoint_->catalog().entries();
  std::vector<SafetensorsEntry> entries;
  for (const uint32_t e : members) {
    TC_ASSIGN_OR_RETURN(const Dtype dtype,
                        OutputDtype(*checkpoint_, e, options_));
    entries.push_back(
        {std::string(catalog[e].name), dtype, catalog[e].shape, 0, 0});
  }
  TC_ASSIGN_OR_RETURN(
      FinalLayout file,
      LayOutFinalFile(std::move(name), std::move(id), std::move(entries)));
  ExtentList extents;
  const uint64_t data = file.header.size();
  sources_->headers.Append(std::move(file.header), &extents);
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const SafetensorsEntry& tensor = file.tensors[i];
    const uint32_t e = members[file.order[i]];
    extents.Place(data + tensor.begin, tensor.end - tensor.begin,
                  sources_->tensors.Find(e, tensor.dtype), 0);
  }
  outputs_.push_back({std::move(file.file), std::move(extents)});
  entries_.insert(entries_.end(), members.begin(), members.end());
  return {};
}

// A file of objects, as it is.
void MergePlan::AddObjects(uint32_t index, const std::string& id) {
  const ManifestFile& file = checkpoint_->files()[index];
  ExtentList extents;
  extents.Append({&sources_->files, index}, file.bytes);
  outputs_.push_back({ToBeStaged(file.name, id, FileRole::kObjects, file.bytes),
                      std::move(extents)});
}

std::string MergePlan::ObjectsFile(const CatalogEntry& object) const {
  return object.archived ? ObjectFileName(0)
                         : checkpoint_->files()[object.file].name;
}

// Objects that stand in archives, as a file of objects.
Status MergePlan::AddArchived(const std::string& id) {
  constexpr size_t kMostText = size_t{1} << 30;
  const std::vector<CatalogEntry>& catalog = checkpoint_->catalog().entries();
  std::vector<uint32_t> members;
  for (const uint32_t e : entries_) {
    if (catalog[e].archived) members.push_back(e);
  }
  TC_ASSIGN_OR_RETURN(const std::vector<Result<std::string>> objects,
                      checkpoint_->ArchivedObjects(members));
  std::string text = "{\"format_version\":1,\"file_id\":\"" + id +
                     "\",\"side_bytes\":0,\"objects\":{";
  for (size_t i = 0; i < members.size(); ++i) {
    TC_RETURN_IF_ERROR(objects[i].status());
    std::string name;
    AppendJsonString(&name, catalog[members[i]].name);
    text +=
        (i > 0 ? ",\n" : "\n") + AsciiJson(name) + ":" + AsciiJson(*objects[i]);
    if (text.size() > kMostText) {
      return Exhausted("its leaves that are no tensors take more than 1 GiB")
          .WithFile(checkpoint_->path());
    }
  }
  text += "\n}}\n";
  AddText(ObjectFileName(0), std::move(text), id);
  return {};
}

// A file of objects that is made here.
void MergePlan::AddText(std::string name, std::string text,
                        const std::string& id) {
  ExtentList extents;
  const uint64_t bytes = text.size();
  sources_->headers.Append(std::move(text), &extents);
  outputs_.push_back(
      {ToBeStaged(std::move(name), id, FileRole::kObjects, bytes),
       std::move(extents)});
}

// Files of objects, without those of entries that the catalog lacks.
Status MergePlan::AddCutObjects(const std::function<std::string()>& take_id) {
  constexpr std::string_view kText = ".json", kSide = ".bin";
  const std::vector<ManifestFile>& files = checkpoint_->files();
  const Catalog& catalog = checkpoint_->catalog();
  std::map<std::string_view, uint32_t> sides;
  for (uint32_t f = 0; f < files.size(); ++f) {
    if (files[f].role == FileRole::kObjects) sides[files[f].name] = f;
  }
  for (uint32_t f = 0; f < files.size(); ++f) {
    const std::string& name = files[f].name;
    if (files[f].role != FileRole::kObjects || !name.ends_with(kText)) continue;
    TC_ASSIGN_OR_RETURN(const std::string text,
                        checkpoint_->file_set()->ReadWhole(f));
    Result<CutText> cut = CutObjects(text, [&](std::string_view leaf) {
      const int64_t e = catalog.Find(leaf);
      return e >= 0 && catalog.entries()[static_cast<size_t>(e)].file == f;
    });
    if (!cut.ok()) {
      return cut.status().WithFile(checkpoint_->path() + "/" + name);
    }
    if (!cut->any) continue;
    AddText(name, std::move(cut->text), take_id());
    const auto side = sides.find(name.substr(0, name.size() - kText.size()) +
                                 std::string(kSide));
    if (cut->sides && side != sides.end()) AddObjects(side->second, take_id());
  }
  return {};
}

// Leaves that are no tensors go along, and aliases of what is there.
void MergePlan::KeepLeaves() {
  const Catalog& catalog = checkpoint_->catalog();
  const std::set<uint32_t> stored(entries_.begin(), entries_.end());
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    const CatalogEntry& entry = catalog.entries()[e];
    if (entry.kind == EntryKind::kObject && options_.objects) {
      entries_.push_back(e);
    }
    if (entry.kind != EntryKind::kAlias || stored.count(e)) continue;
    const auto of = static_cast<uint32_t>(catalog.Find(entry.alias_of));
    if (stored.count(of)) aliases_.push_back(e);
  }
}

Status MergePlan::AddObjectFiles(const std::function<std::string()>& take_id) {
  if (!options_.objects) return {};
  const std::vector<ManifestFile>& files = checkpoint_->files();
  if (options_.cut) TC_RETURN_IF_ERROR(AddCutObjects(take_id));
  for (uint32_t f = 0; f < files.size() && !options_.cut; ++f) {
    if (files[f].role == FileRole::kObjects) AddObjects(f, take_id());
  }
  const std::vector<CatalogEntry>& catalog = checkpoint_->catalog().entries();
  const bool archived =
      std::any_of(catalog.begin(), catalog.end(),
                  [](const CatalogEntry& e) { return e.archived.has_value(); });
  return archived ? AddArchived(take_id()) : Status();
}

Result<MergePlan> MergePlan::Make(std::shared_ptr<const Checkpoint> checkpoint,
                                  MergeOptions options,
                                  std::vector<std::string> ids) {
  TC_ASSIGN_OR_RETURN(const Assigned assigned, Assign(*checkpoint, options));
  // Whatever becomes of other leaves: no tensor is left out unasked.
  for (uint32_t e = 0; e < checkpoint->catalog().entries().size(); ++e) {
    if (checkpoint->FindUnread(e)) {
      TC_RETURN_IF_ERROR(checkpoint->Placements(e).status());
    }
  }
  if (assigned.files.empty()) {
    return Incomplete("holds no tensor").WithFile(checkpoint->path());
  }
  MergePlan plan(std::move(checkpoint), std::move(options));
  size_t next_id = 0;
  const auto take_id = [&]() {
    if (next_id == ids.size()) ids.push_back(NewId());
    return ids[next_id++];
  };
  const FileNaming& naming = plan.options_.naming;
  for (const auto& [index, members] : assigned.files) {
    TC_RETURN_IF_ERROR(plan.AddFile(
        FinalFileName(index, assigned.count, naming), take_id(), members));
  }
  plan.KeepLeaves();
  TC_RETURN_IF_ERROR(plan.AddObjectFiles(take_id));
  if (next_id != ids.size()) {
    return InvalidArgument(
        "the merge plan of this rank has another number of "
        "files than the coordinator's");
  }
  plan.index_name_ = IndexFileName(assigned.count, naming);
  return plan;
}

}  // namespace torch_ckpt
