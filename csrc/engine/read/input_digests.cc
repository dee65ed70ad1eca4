#include "engine/read/input_digests.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "engine/read/range_crc32.h"
#include "runtime/arena.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {

DigestKind DigestsOf(const FileSet& files, bool verify) {
  if (!verify) return DigestKind::kNone;
  return files.has_digests() ? DigestKind::kSegments : DigestKind::kArchives;
}

DigestKind ArchivesOf(const FileSet& files, bool verify) {
  return files.has_digests() ? DigestKind::kNone : DigestsOf(files, verify);
}

void InputDigests::Add(int worker, uint32_t file, uint64_t offset,
                       const std::byte* data, uint64_t size) {
  const Worker& own = workers_[static_cast<size_t>(worker)];
  if (kind_ == DigestKind::kArchives && !own.expected.empty()) {
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

void InputDigests::Expect(int worker, std::span<const DigestedRange> storages) {
  if (kind_ != DigestKind::kArchives || storages.empty()) return;
  auto& expected = workers_[static_cast<size_t>(worker)].expected;
  // Pieces of one tensor, which come one after another, are in the same ones.
  const size_t count = storages.size();
  const bool known = expected.size() >= count &&
                     std::equal(storages.begin(), storages.end(),
                                expected.end() - static_cast<ptrdiff_t>(count));
  if (!known) expected.insert(expected.end(), storages.begin(), storages.end());
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

std::vector<DigestedRange> InputDigests::SortedStorages() {
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

namespace {

// The CRC-32C of a segment, read as far as its digests leave gaps: before the
// first tensor of a file there is a header. All of it where bytes were digested
// twice, or the gaps are many.
template <class Digests>
Result<uint32_t> CrcOfSegment(const ByteSource& source, const Digests& digests,
                              uint64_t begin, uint64_t end,
                              MutableByteSpan scratch) {
  constexpr size_t kMostGaps = 4;
  std::vector<std::pair<uint64_t, uint64_t>> gaps;
  uint64_t at = begin;
  for (const auto& each : digests) {
    if (each.size == 0) continue;
    if (each.offset > at) gaps.emplace_back(at, each.offset);
    if (each.offset < at || gaps.size() > kMostGaps) {
      TC_ASSIGN_OR_RETURN(const std::byte* bytes,
                          source.Read(begin, end, scratch));
      return Crc32c(0, bytes, end - begin);
    }
    at = each.offset + each.size;
  }
  if (at < end) gaps.emplace_back(at, end);
  uint32_t crc = 0;
  auto gap = gaps.begin();
  const auto fill = [&](uint64_t until) -> Status {
    if (gap == gaps.end() || gap->first >= until) return {};
    const auto [lo, hi] = *gap++;
    TC_ASSIGN_OR_RETURN(const std::byte* bytes, source.Read(lo, hi, scratch));
    crc = Crc32c(crc, bytes, hi - lo);
    return {};
  };
  for (const auto& each : digests) {
    if (each.size == 0) continue;
    TC_RETURN_IF_ERROR(fill(each.offset));
    crc = Crc32cCombine(crc, each.crc, each.size);
  }
  TC_RETURN_IF_ERROR(fill(end));
  return crc;
}

}  // namespace

Status InputDigests::CheckSegments(OpenFiles* files, Job* job) {
  const FileSet& set = files->set();
  const Digests digests = SortedDigests();
  // Of each segment: its digests are those from this one on.
  std::vector<size_t> segments;
  for (size_t i = 0; i < digests.size(); ++i) {
    const bool goes_on = i > 0 && digests[i].file == digests[i - 1].file &&
                         digests[i].offset / kSegmentBytes ==
                             digests[i - 1].offset / kSegmentBytes;
    if (!goes_on) segments.push_back(i);
  }
  const auto check = [&](size_t segment) -> Status {
    const size_t first = segments[segment];
    const size_t past =
        segment + 1 < segments.size() ? segments[segment + 1] : digests.size();
    const uint32_t file = digests[first].file;
    const ManifestFile& named = set.files()[file];
    const uint64_t begin = RoundDown(digests[first].offset, kSegmentBytes);
    const uint64_t end = std::min(begin + kSegmentBytes, named.bytes);
    std::optional<uint32_t> crc = Joined(digests, first, file, begin, end);
    if (!crc) {
      TC_ASSIGN_OR_RETURN(const ArenaLease scratch,
                          LeaseBuffer(kSegmentBytes + ByteSource::kSlack, job));
      TC_ASSIGN_OR_RETURN(const auto source, files->Get(file));
      TC_ASSIGN_OR_RETURN(
          crc,
          CrcOfSegment(*source, std::span(digests).subspan(first, past - first),
                       begin, end, scratch.span()));
    }
    if (*crc == named.crc32c[begin / kSegmentBytes]) return {};
    return set.Explain(Corrupt("bytes " + std::to_string(begin) + " to " +
                               std::to_string(end) +
                               " do not match their CRC-32C")
                           .WithFile(set.path() + "/" + named.name));
  };
  return ForEachItem(
      static_cast<int>(workers_.size()), static_cast<int64_t>(segments.size()),
      job, [&](int64_t i, int) { return check(static_cast<size_t>(i)); });
}

Status InputDigests::CheckStorages(OpenFiles* files, Untiled untiled,
                                   Job* job) {
  const Digests digests = SortedDigests();
  const std::vector<DigestedRange> storages = SortedStorages();
  const FileSet& set = files->set();
  const auto check = [&](const DigestedRange& storage) -> Status {
    const uint64_t begin = storage.range.offset;
    const uint64_t end = begin + storage.range.bytes;
    const auto at = std::partition_point(
        digests.begin(), digests.end(), [&](const Digest& digest) {
          return digest.file != storage.file ? digest.file < storage.file
                                             : digest.offset < begin;
        });
    if (at == digests.end() || at->file != storage.file || at->offset >= end) {
      return {};
    }
    std::optional<uint32_t> crc =
        Joined(digests, static_cast<size_t>(at - digests.begin()), storage.file,
               begin, end);
    if (!crc && untiled == Untiled::kPassedOver) return {};
    if (!crc) {
      TC_RETURN_IF_ERROR(
          files->Read(storage.file, [&](const ByteSource& source) -> Status {
            TC_ASSIGN_OR_RETURN(crc, Crc32OfRange(source, storage.range, job));
            return {};
          }));
    }
    if (*crc == storage.crc32) return {};
    return set.Explain(
        Corrupt("the entry of the archive at bytes " + std::to_string(begin) +
                " to " + std::to_string(end) + " does not match its CRC-32")
            .WithFile(set.path() + "/" + set.files()[storage.file].name));
  };
  return ForEachItem(static_cast<int>(workers_.size()),
                     static_cast<int64_t>(storages.size()), job,
                     [&](int64_t i, int) -> Status {
                       return check(storages[static_cast<size_t>(i)]);
                     });
}

Status InputDigests::Check(OpenFiles* files, Untiled untiled, Job* job) {
  switch (kind_) {
    case DigestKind::kSegments:
      return CheckSegments(files, job);
    case DigestKind::kArchives:
      return CheckStorages(files, untiled, job);
    case DigestKind::kNone:
      break;
  }
  return {};
}

}  // namespace torch_ckpt
