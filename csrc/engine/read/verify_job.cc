#include "engine/read/verify_job.h"

#include <algorithm>
#include <vector>

#include "engine/open/open_files.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kStep = uint64_t{8} << 20;

// `file` says the digests of the segments in [begin, end).
Status CheckSegments(const ByteSource& source, const ManifestFile& file,
                     uint64_t begin, uint64_t end, MutableByteSpan scratch) {
  TC_ASSIGN_OR_RETURN(const std::byte* const bytes,
                      source.Read(begin, end, scratch));
  for (uint64_t at = begin; at < end; at += kSegmentBytes) {
    const uint64_t size = std::min(kSegmentBytes, end - at);
    if (Crc32c(0, bytes + (at - begin), size) !=
        file.crc32c[at / kSegmentBytes]) {
      return Corrupt("bytes " + std::to_string(at) + " to " +
                     std::to_string(at + size) + " do not match their CRC-32C")
          .WithFile(source.path());
    }
  }
  return {};
}

}  // namespace

Result<VerifyReport> RunVerifyJob(std::shared_ptr<const Checkpoint> checkpoint,
                                  const VerifyOptions& options, Job* job) {
  if (!checkpoint->file_set()->has_digests()) {
    return Unsupported("has no manifest and so no digests to compare")
        .WithFile(checkpoint->path());
  }
  struct Item {
    uint32_t file;  // of the checkpoint's
    uint64_t begin;
  };
  std::vector<Item> items;
  VerifyReport report;
  const std::vector<ManifestFile>& listed = checkpoint->files();
  for (uint32_t f = 0; f < listed.size(); ++f) {
    const ManifestFile& file = listed[f];
    for (uint64_t at = 0; at < file.bytes; at += kStep) {
      items.push_back({f, at});
    }
    report.bytes += file.bytes;
    ++report.files;
  }
  job->AddTotal(report.bytes);
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
          return CheckSegments(source, file, begin, end, lease.span());
        }));
        job->AddDone(end - begin);
        return {};
      }));
  return report;
}

}  // namespace torch_ckpt
