#include "engine/read/input_digests.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "os/byte_source.h"
#include "runtime/arena.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {

namespace {

constexpr uint64_t kAgainStep = uint64_t{8} << 20;

// Of bytes [begin, end), which are read for it.
Result<uint32_t> Crc32Of(const ByteSource& source, uint64_t begin, uint64_t end,
                         Job* job) {
  TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                      LeaseBuffer(kAgainStep + ByteSource::kSlack, job));
  uint32_t crc = 0;
  for (uint64_t at = begin; at < end; at += kAgainStep) {
    if (job->cancelled()) return Cancelled("the job was cancelled");
    const uint64_t to = std::min(at + kAgainStep, end);
    TC_ASSIGN_OR_RETURN(const std::byte* const bytes,
                        source.Read(at, to, lease.span()));
    crc = Crc32(crc, bytes, to - at);
  }
  return crc;
}

}  // namespace

DigestKind DigestsOf(const Checkpoint& checkpoint, bool verify) {
  if (!verify) return DigestKind::kNone;
  if (checkpoint.file_set()->has_digests()) return DigestKind::kSegments;
  return checkpoint.HasArchives() ? DigestKind::kArchives : DigestKind::kNone;
}

void InputDigests::Add(int worker, uint32_t file, uint64_t offset,
                       const std::byte* data, uint64_t size) {
  if (kind_ == DigestKind::kArchives) {
    Add(worker, file, offset, Crc32(0, data, size), size);
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

void InputDigests::Add(int worker, uint32_t file, uint64_t offset, uint32_t crc,
                       uint64_t size) {
  Digests& digests = workers_[static_cast<size_t>(worker)].digests;
  const bool archives = kind_ == DigestKind::kArchives;
  // Runs mostly continue where the last one ended.
  if (!digests.empty() && digests.back().file == file &&
      digests.back().offset + digests.back().size == offset &&
      (archives || offset % kSegmentBytes != 0)) {
    Digest& last = digests.back();
    last.crc = archives ? Crc32Combine(last.crc, crc, size)
                        : Crc32cCombine(last.crc, crc, size);
    last.size += size;
  } else {
    digests.push_back({file, crc, offset, size});
  }
}

void InputDigests::Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi) {
  Digests& digests = workers_[static_cast<size_t>(worker)].digests;
  // An empty one marks what it is in; it never completes a tiling.
  if (kind_ == DigestKind::kArchives) digests.push_back({file, 0, lo, 0});
  if (kind_ != DigestKind::kSegments) return;
  for (uint64_t at = RoundDown(lo, kSegmentBytes); at < hi;
       at += kSegmentBytes) {
    digests.push_back({file, 0, at, 0});
  }
}

void InputDigests::Expect(int worker, std::span<const DigestedRange> ranges) {
  if (kind_ != DigestKind::kArchives) return;
  auto& expected = workers_[static_cast<size_t>(worker)].expected;
  expected.insert(expected.end(), ranges.begin(), ranges.end());
}

InputDigests::Digests InputDigests::SortedDigests() {
  Digests sorted;
  for (Worker& worker : workers_) {
    sorted.insert(sorted.end(), worker.digests.begin(), worker.digests.end());
    worker.digests.clear();
  }
  std::sort(sorted.begin(), sorted.end(), [](const Digest& a, const Digest& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  return sorted;
}

std::vector<DigestedRange> InputDigests::SortedRanges() {
  std::vector<DigestedRange> sorted;
  for (Worker& worker : workers_) {
    sorted.insert(sorted.end(), worker.expected.begin(), worker.expected.end());
    worker.expected.clear();
  }
  SortRanges(&sorted);
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
  const Digests digests = SortedDigests();
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

Status InputDigests::CheckArchives(OpenFiles* files, Untiled untiled,
                                   Job* job) {
  const Digests digests = SortedDigests();
  const std::vector<DigestedRange> ranges = SortedRanges();
  const auto check = [&](const DigestedRange& range) -> Status {
    const uint64_t begin = range.range.offset;
    const uint64_t end = begin + range.range.bytes;
    const auto at = std::partition_point(
        digests.begin(), digests.end(), [&](const Digest& digest) {
          return digest.file != range.file ? digest.file < range.file
                                           : digest.offset < begin;
        });
    if (at == digests.end() || at->file != range.file || at->offset >= end) {
      return {};
    }
    std::optional<uint32_t> crc =
        Joined(digests, static_cast<size_t>(at - digests.begin()), range.file,
               begin, end);
    if (!crc && untiled == Untiled::kPassedOver) return {};
    TC_ASSIGN_OR_RETURN(const auto source, files->Get(range.file));
    if (!crc) {
      TC_ASSIGN_OR_RETURN(crc, Crc32Of(*source, begin, end, job));
    }
    if (*crc == range.crc32) return {};
    return files->set().Explain(
        Corrupt("the entry of the archive at bytes " + std::to_string(begin) +
                " to " + std::to_string(end) + " does not match its CRC-32")
            .WithFile(source->path()));
  };
  return ForEachItem(static_cast<int>(workers_.size()),
                     static_cast<int64_t>(ranges.size()), job,
                     [&](int64_t i, int) -> Status {
                       return check(ranges[static_cast<size_t>(i)]);
                     });
}

}  // namespace torch_ckpt
