#include "engine/read/verify_job.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/open/archives.h"
#include "engine/open/open_files.h"
#include "engine/read/range_crc32.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kStep = uint64_t{8} << 20;

template <class T>
std::vector<T> ShareOf(std::vector<T> all, const VerifyOptions& options) {
  if (options.shares == 1) return all;
  std::vector<T> own;
  for (size_t i = static_cast<size_t>(options.share); i < all.size();
       i += static_cast<size_t>(options.shares)) {
    own.push_back(std::move(all[i]));
  }
  return own;
}

// One entry of an archive.
Status CheckContent(const ByteSource& source, const ZipContent& content,
                    Job* job) {
  TC_ASSIGN_OR_RETURN(const uint32_t crc,
                      Crc32OfRange(source, content.range, job,
                                   [&](uint64_t n) { job->AddDone(n); }));
  if (crc == content.crc32) return {};
  // Who saves without them writes 0.
  if (content.crc32 == 0) {
    return Unsupported("has an archive that says no checksums to compare")
        .WithFile(source.path());
  }
  return Corrupt("the entry " + content.name +
                 " of the archive does not match its CRC-32, from byte " +
                 std::to_string(content.range.begin) + " on")
      .WithFile(source.path());
}

Status NothingToCompare() { return Unsupported("has no digest to compare"); }

Result<std::vector<ZipContent>> ContentsOf(const Checkpoint& checkpoint,
                                           const Checkpoint::Archive& one,
                                           OpenFiles* files) {
  const Placement& placement = one.placement;
  if (one.tensor && !checkpoint.FindUnread(*one.tensor)) {
    const Status found =
        checkpoint.Resolve(*one.tensor, placement, files).status();
    // One that is not read has digests all the same.
    if (!found.ok() && found.kind() != ErrorKind::kUnsupported) return found;
  }
  std::vector<ZipContent> contents;
  const auto look = [&](const File& file) -> Status {
    TC_ASSIGN_OR_RETURN(const bool zip, IsTorchArchive(file, placement.offset));
    if (!zip && one.tensor) return NothingToCompare();  // a safetensors blob
    if (!zip) {
      return Corrupt("has no archive of torch.save at byte " +
                     std::to_string(placement.offset));
    }
    const ByteRange range = ByteRange::Of(placement.offset, placement.bytes);
    TC_ASSIGN_OR_RETURN(contents, ReadZipContents(file, range));
    return {};
  };
  Status looked = checkpoint.Look(placement.file, look, files);
  if (!looked.ok() && one.tensor) {
    const std::string_view name =
        checkpoint.catalog().entries()[*one.tensor].name;
    looked = std::move(looked).WithTensor(std::string(name));
  }
  TC_RETURN_IF_ERROR(looked);
  return contents;
}

// Names a tensor with bytes that are in none of `archives`, as a chunk of zarr.
Status CheckArchived(const Checkpoint& checkpoint,
                     const std::vector<Checkpoint::Archive>& archives) {
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> ends;  // by file and begin
  for (const Checkpoint::Archive& one : archives) {
    const Placement& at = one.placement;
    if (!one.tensor) ends[{at.file, at.offset}] = at.offset + at.bytes;
  }
  const Catalog& catalog = checkpoint.catalog();
  for (uint32_t e = 0; e < catalog.entries().size(); ++e) {
    const CatalogEntry& entry = catalog.entries()[e];
    if (entry.archived && entry.archived->archive.size() == 0 &&
        checkpoint.FindUnread(e)) {
      return NothingToCompare()
          .WithTensor(std::string(entry.name))
          .WithFile(checkpoint.path());
    }
    if (entry.kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog.Placements(e, checkpoint.files()));
    for (const Placement& at : placements) {
      if (at.kind == PlacementKind::kArchive || at.box.Volume() == 0) continue;
      const auto after = ends.upper_bound({at.file, at.offset});
      if (after != ends.begin()) {
        const auto& [begin, end] = *std::prev(after);
        if (begin.first == at.file && at.offset < end) continue;
      }
      return NothingToCompare()
          .WithTensor(std::string(entry.name))
          .WithFile(checkpoint.path() + "/" + checkpoint.files()[at.file].name);
    }
  }
  return {};
}

// Of a checkpoint without digests, what its archives say of themselves.
Result<VerifyReport> VerifyArchives(const Checkpoint& checkpoint,
                                    const VerifyOptions& options, Job* job) {
  TC_ASSIGN_OR_RETURN(std::vector<Checkpoint::Archive> archives,
                      checkpoint.Archives());
  if (archives.empty()) {
    return Unsupported("has no manifest and so no digests to compare")
        .WithFile(checkpoint.path());
  }
  TC_RETURN_IF_ERROR(CheckArchived(checkpoint, archives));
  archives = ShareOf(std::move(archives), options);
  std::set<uint32_t> named;
  uint64_t total = 0;
  for (const Checkpoint::Archive& one : archives) {
    named.insert(one.placement.file);
    total += one.placement.bytes;
  }
  job->AddTotal(total);
  std::atomic<uint64_t> checked{0};
  OpenFiles files(checkpoint.file_set(), options.direct_io);
  TC_RETURN_IF_ERROR(ForEachItem(
      std::max(1, options.workers), static_cast<int64_t>(archives.size()), job,
      [&](int64_t i, int) -> Status {
        const Checkpoint::Archive& one = archives[static_cast<size_t>(i)];
        const Placement& placement = one.placement;
        TC_ASSIGN_OR_RETURN(const std::vector<ZipContent> contents,
                            ContentsOf(checkpoint, one, &files));
        uint64_t of_archive = 0;
        for (const ZipContent& content : contents) {
          TC_RETURN_IF_ERROR(
              files.Read(placement.file, [&](const ByteSource& source) {
                return CheckContent(source, content, job);
              }));
          of_archive += content.range.size();
        }
        checked += of_archive;
        job->AddDone(placement.bytes - std::min(placement.bytes, of_archive));
        return {};
      }));
  TC_RETURN_IF_ERROR(files.CheckUnchanged());
  return VerifyReport{checked, named.size()};
}

}  // namespace

Result<VerifyReport> RunVerifyJob(std::shared_ptr<const Checkpoint> checkpoint,
                                  const VerifyOptions& options, Job* job) {
  if (!checkpoint->file_set()->has_digests()) {
    return VerifyArchives(*checkpoint, options, job);
  }
  struct Item {
    uint32_t file;  // of the checkpoint's
    uint64_t begin;
  };
  std::vector<Item> items;
  const std::vector<ManifestFile>& listed = checkpoint->files();
  for (uint32_t f = 0; f < listed.size(); ++f) {
    const ManifestFile& file = listed[f];
    for (uint64_t at = 0; at < file.bytes; at += kStep) {
      items.push_back({f, at});
    }
  }
  items = ShareOf(std::move(items), options);
  VerifyReport report;
  std::set<uint32_t> named;
  for (const Item& item : items) {
    named.insert(item.file);
    report.bytes += std::min(kStep, listed[item.file].bytes - item.begin);
  }
  // Empty ones have nothing to compare.
  report.files = options.shares == 1 ? listed.size() : named.size();
  job->AddTotal(report.bytes);
  // Opened anew: what is at their names now is to be verified, not what a job
  // has left open.
  OpenFiles files(checkpoint->file_set(), options.direct_io);
  TC_RETURN_IF_ERROR(ForEachItem(
      std::max(1, options.workers), static_cast<int64_t>(items.size()), job,
      [&](int64_t i, int) -> Status {
        const uint32_t f = items[static_cast<size_t>(i)].file;
        const uint64_t begin = items[static_cast<size_t>(i)].begin;
        const ManifestFile& file = listed[f];
        TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                            LeaseBuffer(kStep + ByteSource::kSlack, job));
        const uint64_t end = std::min(begin + kStep, file.bytes);
        TC_RETURN_IF_ERROR(files.Read(f, [&](const ByteSource& source) {
          const auto bytes = source.Read(begin, end, lease.span());
          if (!bytes.ok()) return bytes.status();
          return CheckSegments(file, begin, {*bytes, end - begin})
              .WithFile(source.path());
        }));
        job->AddDone(end - begin);
        return {};
      }));
  return report;
}

}  // namespace torch_ckpt
