#include "engine/merge/fill_archives.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "engine/open/archives.h"
#include "engine/write/converted_tensors.h"
#include "engine/write/stored_providers.h"

namespace torch_ckpt {
namespace {

class Filler {
 public:
  Filler(std::shared_ptr<const Checkpoint> source,
         std::shared_ptr<const Checkpoint> layout, const FillOptions& options)
      : source_(std::move(source)),
        layout_(std::move(layout)),
        options_(options),
        inputs_(source_->LendFiles(options.output.direct_io), options.verify,
                std::max(1, options.output.workers)),
        own_(layout_->LendFiles(options.output.direct_io), /*verify=*/false,
             std::max(1, options.output.workers)),
        tensors_(source_, &inputs_),
        files_(&own_),
        elements_(layout_->files().size()) {}

  Status Run(const Directory& out, Job* job) {
    for (const auto& [name, stored] : options_.tensors) {
      Status added = AddTensor(name, stored);
      if (!added.ok()) return std::move(added).WithTensor(stored);
    }
    TC_RETURN_IF_ERROR(FindUnsealed());
    OutputOptions unsynced = options_.output;
    unsynced.sync = false;  // the checksums come after
    TC_RETURN_IF_ERROR(WriteOutputs(out, Outputs(), unsynced, job).status());
    TC_RETURN_IF_ERROR(inputs_.Check(job));
    TC_RETURN_IF_ERROR(own_.Check(job));
    TC_RETURN_IF_ERROR(tensors_.Check());
    return Seal(out);
  }

 private:
  Status AddTensor(const std::string& name, const std::string& of) {
    const int64_t at = layout_->catalog().Find(name);
    const int64_t found = source_->catalog().Find(of);
    if (at < 0) return Incomplete("is not in the layout");
    if (found < 0) return Incomplete("is not in the checkpoint");
    const auto e = static_cast<uint32_t>(at);
    const CatalogEntry& wanted = layout_->catalog().entries()[e];
    if (wanted.kind == EntryKind::kAlias) return {};  // of another of these
    const CatalogEntry& stored =
        source_->catalog().entries()[static_cast<size_t>(found)];
    if (stored.kind == EntryKind::kObject || !(stored.shape == wanted.shape)) {
      return InvalidArgument("is another one in the layout");
    }
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        layout_->Placements(e));
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        ByteSize(wanted.dtype, wanted.shape));
    if (bytes == 0) return {};
    if (placements.size() != 1 ||
        !(placements[0].box == Box::Whole(wanted.shape))) {
      return InvalidArgument("is in several boxes in the layout");
    }
    const auto stored_entry = static_cast<uint32_t>(found);
    TC_RETURN_IF_ERROR(CheckConverts(*source_, stored_entry, wanted.dtype));
    const Origin origin = tensors_.Find(stored_entry, wanted.dtype);
    const uint64_t begin = placements[0].offset;
    elements_[placements[0].file].push_back({begin, begin + bytes, origin, 0});
    return {};
  }

  std::vector<Output> Outputs() {
    std::vector<Output> outputs;
    for (uint32_t f = 0; f < elements_.size(); ++f) {
      const ManifestFile& file = layout_->files()[f];
      std::sort(
          elements_[f].begin(), elements_[f].end(),
          [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
      ExtentList extents;
      uint64_t at = 0;
      for (const Extent& extent : elements_[f]) {
        extents.Place(at, extent.begin - at, {&files_, f}, at);
        at = extent.end;
        extents.Place(extent.begin, at - extent.begin, extent.origin, 0);
      }
      extents.Place(at, file.bytes - at, {&files_, f}, at);
      Output& output = outputs.emplace_back();
      output.file.name = output.file.staged = file.name;
      output.file.bytes = file.bytes;
      output.extents = std::move(extents);
      output.crcs = &crcs_[f];
    }
    return outputs;
  }

  using Entries = std::vector<std::vector<ZipContent>>;

  // Those of all archives, by file and in the order of their bytes.
  Result<Entries> EntriesOf(const std::vector<File>& files) const {
    Entries entries(files.size());
    TC_ASSIGN_OR_RETURN(const auto archives, layout_->Archives());
    for (const Checkpoint::Archive& each : archives) {
      const Placement& at = each.placement;
      const ByteRange range = ByteRange::Of(at.offset, at.bytes);
      auto found = ReadZipContents(files[at.file], range);
      if (!found.ok()) return found.status().WithFile(files[at.file].path());
      std::move(found->begin(), found->end(),
                std::back_inserter(entries[at.file]));
    }
    for (std::vector<ZipContent>& of_file : entries) {
      std::sort(of_file.begin(), of_file.end(),
                [](const ZipContent& a, const ZipContent& b) {
                  return a.range.begin < b.range.begin;
                });
    }
    return entries;
  }

  // Without a checksum, which torch leaves out with the elements.
  static bool IsUnsealed(const ZipContent& entry) {
    return entry.crc32 == 0 && entry.range.size() > 0;
  }

  Status FindUnsealed() {
    std::vector<File> files;
    for (uint32_t f = 0; f < layout_->files().size(); ++f) {
      TC_ASSIGN_OR_RETURN(File file, layout_->file_set()->OpenFile(f));
      files.push_back(std::move(file));
    }
    TC_ASSIGN_OR_RETURN(entries_, EntriesOf(files));
    for (uint32_t f = 0; f < files.size(); ++f) {
      std::vector<ByteRange> ranges;
      for (const ZipContent& entry : entries_[f]) {
        if (!IsUnsealed(entry)) continue;
        TC_RETURN_IF_ERROR(CheckTail(files[f], entry));
        ranges.push_back(entry.range);
      }
      crcs_.emplace_back(std::move(ranges));
    }
    return {};
  }

  // Of one whose checksum stands behind it as well.
  static Status CheckTail(const File& file, const ZipContent& content) {
    if (content.crc32_at.size() < 2) return {};
    std::string magic(4, '\0');
    TC_RETURN_IF_ERROR(file.ReadExact(
        {reinterpret_cast<std::byte*>(magic.data()), magic.size()},
        content.range.end));
    if (magic == "PK\x07\x08") return {};
    return Unsupported("torch lays out its archives in another way")
        .WithFile(file.path());
  }

  // Writes the checksums, syncs, and looks whether each archive is as it is to
  // be: nothing else says later what belongs to it.
  Status Seal(const Directory& out) {
    std::vector<File> files;
    for (uint32_t f = 0; f < entries_.size(); ++f) {
      TC_ASSIGN_OR_RETURN(
          File file, out.OpenFile(layout_->files()[f].name, {.write = true}));
      size_t sealed = 0;
      for (ZipContent& entry : entries_[f]) {
        if (!IsUnsealed(entry)) continue;
        TC_ASSIGN_OR_RETURN(entry.crc32, crcs_[f].Find(sealed++));
        for (const uint64_t at : entry.crc32_at) {
          TC_RETURN_IF_ERROR(
              file.WriteAll({reinterpret_cast<const std::byte*>(&entry.crc32),
                             sizeof entry.crc32},
                            at));
        }
      }
      TC_RETURN_IF_ERROR(file.Sync());
      files.push_back(std::move(file));
    }
    TC_ASSIGN_OR_RETURN(const Entries written, EntriesOf(files));
    for (uint32_t f = 0; f < files.size(); ++f) {
      if (written[f] == entries_[f]) continue;
      return Corrupt("is not what was written to it").WithFile(files[f].path());
    }
    return {};
  }

  const std::shared_ptr<const Checkpoint> source_, layout_;
  const FillOptions& options_;
  StoredInputs inputs_, own_;
  ConvertedTensors tensors_;
  StoredFiles files_;
  // By file of the layout: where the elements of a tensor go.
  std::vector<std::vector<Extent>> elements_;
  Entries entries_;
  std::deque<OutputCrcs> crcs_;
};

// What of a layout has no elements goes along as it is.
Status TakeOthers(const Checkpoint& layout, const Directory& staging) {
  TC_ASSIGN_OR_RETURN(const Directory laid_out,
                      staging.OpenDirectory(std::string(kLayoutName)));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, laid_out.List());
  for (const std::string& name : names) {
    if (layout.file_set()->FindFile(name) >= 0) continue;
    TC_ASSIGN_OR_RETURN(const File file, laid_out.OpenFile(name, {}));
    TC_RETURN_IF_ERROR(file.Sync());
    TC_RETURN_IF_ERROR(laid_out.Rename(name, staging, name));
  }
  return {};
}

}  // namespace

Status FillArchives(const std::shared_ptr<const Checkpoint>& source,
                    const std::shared_ptr<const Checkpoint>& layout,
                    const FillOptions& options, const ForeignTarget& target,
                    SaveSession* session, Job* job) {
  const Directory& staging = session->directory();
  const auto fill = [&]() -> Status {
    TC_RETURN_IF_ERROR(Filler(source, layout, options).Run(staging, job));
    return target.is_file ? Status() : TakeOthers(*layout, staging);
  };
  TC_RETURN_IF_ERROR(ExplainGone(fill(), session->place().path));
  return CommitForeign(session, target,
                       target.is_file ? layout->files()[0].name : "");
}

}  // namespace torch_ckpt
