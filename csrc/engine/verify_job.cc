#include "engine/verify_job.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "engine/open_files.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr std::chrono::minutes kPatience{10};
constexpr uint64_t kStep = uint64_t{8} << 20;

}  // namespace

Result<VerifyReport> RunVerifyJob(std::shared_ptr<const Checkpoint> checkpoint,
                                  int workers, Job* job) {
  const Manifest* manifest = checkpoint->manifest();
  if (!manifest) {
    return Unsupported("has no manifest and so no digests to compare")
        .WithFile(checkpoint->path());
  }
  struct Item {
    const ManifestFile* file;
    uint64_t begin;
  };
  std::vector<Item> items;
  VerifyReport report;
  for (const ManifestFile& file : manifest->files) {
    for (uint64_t at = 0; at < file.bytes; at += kStep) {
      items.push_back({&file, at});
    }
    report.bytes += file.bytes;
    ++report.files;
  }
  job->AddTotal(report.bytes);
  TC_RETURN_IF_ERROR(ForEachItem(
      std::max(1, workers), static_cast<int64_t>(items.size()), job,
      [&](int64_t i, int) -> Status {
        const Item& item = items[static_cast<size_t>(i)];
        TC_ASSIGN_OR_RETURN(
            const ArenaLease lease,
            Arena::Process().Lease(kStep + 2 * 4096, kPatience));
        // Opened for each step: there may be more files than descriptors.
        TC_ASSIGN_OR_RETURN(File opened,
                            checkpoint->OpenFile(item.file->name, false));
        const SourceFile source(checkpoint.get(), item.file->name,
                                std::move(opened));
        const uint64_t end = std::min(item.begin + kStep, item.file->bytes);
        TC_ASSIGN_OR_RETURN(const std::byte* bytes,
                            source.Read(item.begin, end, lease.span()));
        for (uint64_t at = item.begin; at < end; at += kSegmentBytes) {
          const uint64_t size = std::min(kSegmentBytes, end - at);
          if (Crc32c(0, bytes + (at - item.begin), size) !=
              item.file->crc32c[at / kSegmentBytes]) {
            return checkpoint->Explain(Corrupt("bytes " + std::to_string(at) +
                                               " to " +
                                               std::to_string(at + size) +
                                               " do not match their CRC-32C")
                                           .WithFile(source.path()));
          }
        }
        job->AddDone(end - item.begin);
        return {};
      }));
  return report;
}

}  // namespace torch_ckpt
