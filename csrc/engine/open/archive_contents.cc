#include "engine/open/archive_contents.h"

#include <algorithm>
#include <string>

#include "runtime/crc32.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kStep = kContentScratch - ByteSource::kSlack;

}  // namespace

Result<std::vector<ZipContent>> ContentsOf(const Checkpoint& checkpoint,
                                           const Checkpoint::Archive& archive) {
  const Placement& placement = archive.placement;
  if (archive.tensor) {
    TC_RETURN_IF_ERROR(checkpoint.Resolve(*archive.tensor, placement).status());
  }
  TC_ASSIGN_OR_RETURN(const File file,
                      checkpoint.file_set()->OpenFile(placement.file));
  const auto contents = [&]() -> Result<std::vector<ZipContent>> {
    TC_ASSIGN_OR_RETURN(const bool zip, IsTorchArchive(file, placement.offset));
    if (!zip) return std::vector<ZipContent>();
    TC_ASSIGN_OR_RETURN(
        const TorchArchive opened,
        TorchArchive::Open(file, {placement.offset, placement.bytes},
                           kMaxObjectPickle));
    return opened.Contents();
  }();
  if (!contents.ok()) return contents.status().WithFile(file.path());
  return contents;
}

Status CheckContent(const ByteSource& source, const ZipContent& content,
                    MutableByteSpan scratch, const Job* job,
                    const std::function<void(uint64_t)>& done) {
  uint32_t crc = 0;
  const uint64_t end = content.range.offset + content.range.bytes;
  for (uint64_t at = content.range.offset; at < end; at += kStep) {
    if (job->cancelled()) return Cancelled("the job was cancelled");
    const uint64_t to = std::min(at + kStep, end);
    TC_ASSIGN_OR_RETURN(const std::byte* const bytes,
                        source.Read(at, to, scratch));
    crc = Crc32(crc, bytes, to - at);
    done(to - at);
  }
  return CheckContent(source.path(), content, crc);
}

Status CheckContent(const std::string& path, const ZipContent& content,
                    uint32_t crc) {
  if (crc == content.crc32) return {};
  return Corrupt("the entry " + content.name +
                 " of the archive does not match its CRC-32, from byte " +
                 std::to_string(content.range.offset) + " on")
      .WithFile(path);
}

}  // namespace torch_ckpt
