#include "engine/merge/merge_job.h"

#include <cerrno>
#include <set>

#include "engine/commit/commit.h"
#include "engine/commit/staged_files.h"
#include "format/names.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

// By inode: another path may lead to the same directory. `output` may be
// absent.
Result<bool> IsSameDirectory(const std::string& input,
                             const std::string& output) {
  TC_ASSIGN_OR_RETURN(const Directory from, Directory::Open(input));
  TC_ASSIGN_OR_RETURN(const FileInfo input_info, from.Stat());
  Result<Directory> to = Directory::Open(output);
  const int error = to.status().sys_errno();
  if (error == ENOENT || error == ENOTDIR) return false;
  if (!to.ok()) return to.status();
  TC_ASSIGN_OR_RETURN(const FileInfo output_info, to->Stat());
  return input_info.SameFile(output_info);
}

// The files of the input's manifest that stay, see CommitMerge.
Result<std::vector<std::string>> KeptInPlace(const MergePlan& plan,
                                             bool replaces) {
  const Checkpoint& input = plan.checkpoint();
  if (input.source() != kManifestSource) {
    return std::vector<std::string>();
  }
  std::set<std::string> keep;
  for (const ManifestFile& file : input.files()) {
    const bool stays_anyway = file.role == FileRole::kExtra;
    const bool stays_beside =
        file.role == FileRole::kObjects ||
        (file.role == FileRole::kData && IsShardName(FileNameOf(file.name)));
    if (stays_anyway || (stays_beside && !replaces)) keep.insert(file.name);
  }
  if (replaces) return std::vector<std::string>(keep.begin(), keep.end());
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

Result<NewFiles> NewFilesOf(const MergePlan& plan, const BegunMerge& merge) {
  NewFiles files;
  for (const Output& output : plan.outputs()) {
    if (output.file.role == FileRole::kData) {
      files.names.push_back(output.file.name);
    }
  }
  if (!plan.index_name().empty()) files.names.push_back(plan.index_name());
  if (merge.in_place) {
    TC_ASSIGN_OR_RETURN(files.keep, KeptInPlace(plan, merge.replaces));
  }
  return files;
}

// kConflict, naming it, for what stands where a file is to be written.
Status CheckNothingThere(const std::string& target, const NewFiles& files,
                         const std::vector<std::string>& extras) {
  Result<Directory> directory = Directory::Open(target);
  if (directory.status().sys_errno() == ENOENT) return {};
  TC_RETURN_IF_ERROR(directory.status());
  std::vector<std::string> names = files.names;
  for (const std::string& path : extras) names.push_back(BaseName(path));
  for (const std::string& name : names) {
    TC_ASSIGN_OR_RETURN(const auto there, directory->StatEntry(name));
    if (!there) continue;
    return Conflict(
               "is there already; overwrite=True (--overwrite) replaces it")
        .WithFile(directory->Join(name));
  }
  return {};
}

// What is in the output, by names.
void NameLeaves(const MergePlan& plan, CommitRequest* commit) {
  const Catalog& catalog = plan.checkpoint().catalog();
  for (const uint32_t e : plan.entries()) {
    const CatalogEntry& entry = catalog.entries()[e];
    commit->planned.emplace_back(entry.name, entry.path);
    if (entry.kind != EntryKind::kObject) continue;
    commit->objects.push_back(
        {std::string(entry.name), plan.ObjectsFile(entry)});
  }
  for (const uint32_t e : plan.aliases()) {
    const CatalogEntry& entry = catalog.entries()[e];
    commit->planned.emplace_back(entry.name, entry.path);
    commit->aliases.emplace_back(entry.name, entry.alias_of);
  }
}

}  // namespace

Result<BegunMerge> BeginMerge(const MergePlan& plan,
                              const MergeTarget& target) {
  BegunMerge merge;
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target.path));
  TC_ASSIGN_OR_RETURN(merge.in_place,
                      IsSameDirectory(plan.checkpoint().path(), absolute));
  merge.replaces = merge.in_place && target.replaces;
  if (merge.in_place && plan.options().cut && !merge.replaces) {
    return InvalidArgument(
               "a part of a checkpoint is not merged into its own directory, "
               "where the rest would be lost; give another one")
        .WithFile(absolute);
  }
  TC_ASSIGN_OR_RETURN(SaveSession session,
                      BeginSave(target.path, target.overwrite || merge.in_place,
                                target.others));
  TC_ASSIGN_OR_RETURN(const NewFiles files, NewFilesOf(plan, merge));
  TC_RETURN_IF_ERROR(session.CheckNotHidden(files));
  if (!target.overwrite) {
    TC_RETURN_IF_ERROR(
        CheckNothingThere(session.place().target, files, target.extras));
  }
  merge.session = std::make_unique<SaveSession>(std::move(session));
  return merge;
}

Result<std::vector<std::vector<WrittenRange>>> RunMergeJob(
    const MergePlan& plan, const Directory& staging,
    const std::vector<Output>& outputs, Job* job) {
  const MergeOptions& options = plan.options();
  TC_ASSIGN_OR_RETURN(auto written,
                      WriteOutputs(staging, outputs, options.output, job));
  TC_RETURN_IF_ERROR(plan.inputs()->Check(job));
  TC_RETURN_IF_ERROR(plan.CheckCasts());
  return written;
}

Result<Manifest> CommitMerge(const MergePlan& plan, BegunMerge* merge,
                             const std::vector<std::string>& extras,
                             std::vector<std::vector<WrittenRange>> written) {
  CommitRequest commit;
  commit.index_name = plan.index_name();
  commit.metadata = plan.checkpoint().metadata();
  if (merge->in_place) {
    TC_ASSIGN_OR_RETURN(commit.keep, KeptInPlace(plan, merge->replaces));
  }
  for (size_t i = 0; i < plan.outputs().size(); ++i) {
    StagedFile file = plan.outputs()[i].file;
    Result<std::vector<uint32_t>> digests =
        CombineRanges(std::move(written[i]), file.bytes);
    if (!digests.ok()) return digests.status().WithFile(file.name);
    file.crc32c = std::move(digests).value();
    commit.files.push_back(std::move(file));
  }
  NameLeaves(plan, &commit);
  TC_RETURN_IF_ERROR(
      AddStagedExtras(merge->session->directory(), extras, {}, &commit));
  return CommitSave(merge->session.get(), commit);
}

}  // namespace torch_ckpt
