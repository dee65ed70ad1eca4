#include "engine/read/input_digests.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "engine/open/archive_contents.h"
#include "runtime/arena.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {

void InputDigests::Add(int worker, uint32_t file, uint64_t offset,
                       const std::byte* data, uint64_t size) {
  if (kind_ == DigestKind::kArchives) {
    Digests& digests = digests_[static_cast<size_t>(worker)];
    const bool goes_on = !digests.empty() && digests.back().file == file &&
                         digests.back().offset + digests.back().size == offset;
    if (!goes_on) digests.push_back({file, 0, offset, 0});
    Digest& last = digests.back();
    last.crc = Crc32(last.crc, data, size);
    last.size += size;
    return;
  }
  while (kind_ == DigestKind::kSegments && size > 0) {
    const uint64_t cut = RoundDown(offset, kSegmentBytes) + kSegmentBytes;
    const uint64_t length = std::min(size, cut - offset);
    Add(worker, file, offset, Crc32c(0, data, length), length);
    data += length;
    offset += length;
    size -= length;
  }
}

void InputDigests::Add(int worker, uint32_t file, uint64_t offset,
                       uint32_t crc32c, uint64_t size) {
  Digests& digests = digests_[static_cast<size_t>(worker)];
  // Runs mostly continue where the last one ended.
  if (!digests.empty() && digests.back().file == file &&
      digests.back().offset + digests.back().size == offset &&
      offset % kSegmentBytes != 0) {
    Digest& last = digests.back();
    last.crc = Crc32cCombine(last.crc, crc32c, size);
    last.size += size;
  } else {
    digests.push_back({file, crc32c, offset, size});
  }
}

void InputDigests::Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi) {
  Digests& digests = digests_[static_cast<size_t>(worker)];
  // An empty one marks what it is in; it never completes a tiling.
  if (kind_ == DigestKind::kArchives) digests.push_back({file, 0, lo, 0});
  if (kind_ != DigestKind::kSegments) return;
  for (uint64_t at = RoundDown(lo, kSegmentBytes); at < hi;
       at += kSegmentBytes) {
    digests.push_back({file, 0, at, 0});
  }
}

InputDigests::Digests InputDigests::Sorted() {
  Digests sorted;
  for (Digests& of_worker : digests_) {
    sorted.insert(sorted.end(), of_worker.begin(), of_worker.end());
    of_worker.clear();
  }
  std::sort(sorted.begin(), sorted.end(), [](const Digest& a, const Digest& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  return sorted;
}

std::optional<uint32_t> InputDigests::Joined(const Digests& sorted,
                                             size_t first, uint32_t file,
                                             uint64_t begin,
                                             uint64_t end) const {
  uint32_t crc = 0;
  uint64_t at = begin;
  for (size_t i = first;
       i < sorted.size() && sorted[i].file == file && sorted[i].offset < end;
       ++i) {
    if (sorted[i].offset != at) return std::nullopt;
    crc = kind_ == DigestKind::kArchives
              ? Crc32Combine(crc, sorted[i].crc, sorted[i].size)
              : Crc32cCombine(crc, sorted[i].crc, sorted[i].size);
    at += sorted[i].size;
  }
  if (at != end) return std::nullopt;
  return crc;
}

Status InputDigests::CheckSegments(OpenFiles* files, const Job* job) {
  const FileSet& set = files->set();
  const Digests digests = Sorted();
  ArenaLease scratch;
  for (size_t i = 0; i < digests.size();) {
    const uint32_t file = digests[i].file;
    const ManifestFile& named = set.files()[file];
    const uint64_t begin = RoundDown(digests[i].offset, kSegmentBytes);
    const uint64_t end = std::min(begin + kSegmentBytes, named.bytes);
    std::optional<uint32_t> crc = Joined(digests, i, file, begin, end);
    while (i < digests.size() && digests[i].file == file &&
           digests[i].offset < end) {
      ++i;
    }
    if (!crc) {
      if (job->cancelled()) return Cancelled("the job was cancelled");
      if (!scratch) {
        TC_ASSIGN_OR_RETURN(
            scratch, LeaseBuffer(kSegmentBytes + ByteSource::kSlack, job));
      }
      TC_ASSIGN_OR_RETURN(const auto source, files->Get(file));
      TC_ASSIGN_OR_RETURN(const std::byte* bytes,
                          source->Read(begin, end, scratch.span()));
      crc = Crc32c(0, bytes, end - begin);
    }
    if (*crc != named.crc32c[begin / kSegmentBytes]) {
      return set.Explain(Corrupt("bytes " + std::to_string(begin) + " to " +
                                 std::to_string(end) +
                                 " do not match their CRC-32C")
                             .WithFile(set.path() + "/" + named.name));
    }
  }
  return {};
}

Status InputDigests::CheckArchives(const Checkpoint& checkpoint,
                                   OpenFiles* files, Job* job) {
  const Digests digests = Sorted();
  TC_ASSIGN_OR_RETURN(const std::vector<Checkpoint::Archive> archives,
                      checkpoint.Archives());
  // The first one from there on.
  const auto first = [&](uint32_t file, uint64_t offset) {
    const auto at = std::partition_point(
        digests.begin(), digests.end(), [&](const Digest& digest) {
          return digest.file != file ? digest.file < file
                                     : digest.offset < offset;
        });
    return static_cast<size_t>(at - digests.begin());
  };
  const auto touched = [&](uint32_t file, FileRange range) {
    const size_t at = first(file, range.offset);
    return at < digests.size() && digests[at].file == file &&
           digests[at].offset < range.offset + range.bytes;
  };
  const auto check = [&](uint32_t file, const ZipContent& content) -> Status {
    const auto [offset, bytes] = content.range;
    // Who saves without them writes 0.
    if (content.crc32 == 0 || !touched(file, content.range)) return {};
    const std::optional<uint32_t> crc =
        Joined(digests, first(file, offset), file, offset, offset + bytes);
    TC_ASSIGN_OR_RETURN(const auto source, files->Get(file));
    if (crc) return CheckContent(source->path(), content, *crc);
    TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                        LeaseBuffer(kContentScratch, job));
    return CheckContent(*source, content, lease.span(), job, [](uint64_t) {});
  };
  return ForEachItem(
      static_cast<int>(digests_.size()), static_cast<int64_t>(archives.size()),
      job, [&](int64_t i, int) -> Status {
        const Checkpoint::Archive& one = archives[static_cast<size_t>(i)];
        const Placement& placement = one.placement;
        if (!touched(placement.file, {placement.offset, placement.bytes})) {
          return {};
        }
        TC_ASSIGN_OR_RETURN(const std::vector<ZipContent> contents,
                            ContentsOf(checkpoint, one));
        for (const ZipContent& content : contents) {
          const Status status = check(placement.file, content);
          if (!status.ok()) return files->set().Explain(status);
        }
        return {};
      });
}

}  // namespace torch_ckpt
