#include "engine/read/input_digests.h"

#include <algorithm>
#include <span>
#include <string>

#include "base/checked.h"
#include "engine/read/range_crc32.h"
#include "runtime/arena.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {

const ManifestFile* InputDigests::SegmentsOf(uint32_t file) const {
  const ManifestFile& listed = files_.files()[file];
  const bool compared = verify_ || listed.container != Container::kSafetensors;
  return files_.has_digests() && compared ? &listed : nullptr;
}

uint32_t InputDigests::Combine(uint32_t crc, const ReadDigest& next) const {
  return of_archives() ? Crc32Combine(crc, next.crc, next.size)
                       : Crc32cCombine(crc, next.crc, next.size);
}

void InputDigests::Append(const ReadDigest& digest, ReadBytes* to) const {
  std::vector<ReadDigest>& digests = to->digests;
  if (!digests.empty() && digests.back().file == digest.file &&
      digests.back().offset + digests.back().size == digest.offset &&
      digest.offset % kSegmentBytes != 0) {
    digests.back().crc = Combine(digests.back().crc, digest);
    digests.back().size += digest.size;
  } else {
    digests.push_back(digest);
  }
}

void InputDigests::AppendStorage(const DigestedRange& storage, ReadBytes* to) {
  if (!to->storages.empty() && to->storages.back() == storage) return;
  to->storages.push_back(storage);
}

void InputDigests::Keep(int worker, const ReadBytes& read) {
  ReadBytes* const own = &workers_[static_cast<size_t>(worker)];
  for (const ReadDigest& digest : read.digests) Append(digest, own);
  for (const DigestedRange& storage : read.storages) {
    AppendStorage(storage, own);
  }
}

ReadBytes InputDigests::TakeSorted() {
  ReadBytes all;
  for (ReadBytes& worker : workers_) {
    all.digests.insert(all.digests.end(), worker.digests.begin(),
                       worker.digests.end());
    all.storages.insert(all.storages.end(), worker.storages.begin(),
                        worker.storages.end());
    worker = {};
  }
  std::sort(all.digests.begin(), all.digests.end(),
            [](const ReadDigest& a, const ReadDigest& b) {
              return a.file != b.file ? a.file < b.file : a.offset < b.offset;
            });
  SortRanges(&all.storages);
  return all;
}

std::optional<uint32_t> InputDigests::Joined(
    const std::vector<ReadDigest>& sorted, size_t first, uint32_t file,
    uint64_t begin, uint64_t end) const {
  uint32_t crc = 0;
  uint64_t at = begin;
  for (size_t i = first;
       i < sorted.size() && sorted[i].file == file && sorted[i].offset < end;
       ++i) {
    if (sorted[i].offset != at) return std::nullopt;
    crc = Combine(crc, sorted[i]);
    at += sorted[i].size;
  }
  if (at != end) return std::nullopt;
  return crc;
}

namespace {

// The CRC-32C of a segment, read as far as its digests leave gaps: before the
// first tensor of a file there is a header. All of it where bytes were digested
// twice, or the gaps are many.
Result<uint32_t> CrcOfSegment(const ByteSource& source,
                              std::span<const ReadDigest> digests,
                              uint64_t begin, uint64_t end,
                              MutableByteSpan scratch) {
  constexpr size_t kMostGaps = 4;
  std::vector<std::pair<uint64_t, uint64_t>> gaps;
  uint64_t at = begin;
  for (const ReadDigest& each : digests) {
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
  for (const ReadDigest& each : digests) {
    TC_RETURN_IF_ERROR(fill(each.offset));
    crc = Crc32cCombine(crc, each.crc, each.size);
  }
  TC_RETURN_IF_ERROR(fill(end));
  return crc;
}

}  // namespace

Status InputDigests::CheckSegments(OpenFiles* files, Job* job) {
  const std::vector<ReadDigest> digests = TakeSorted().digests;
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
    const ManifestFile& named = files_.files()[file];
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
    return files_.Explain(CheckSegment(named, begin, *crc)
                              .WithFile(files_.path() + "/" + named.name));
  };
  return ForEachItem(
      static_cast<int>(workers_.size()), static_cast<int64_t>(segments.size()),
      job, [&](int64_t i, int) { return check(static_cast<size_t>(i)); });
}

Status InputDigests::CheckStorages(OpenFiles* files, Wholes wholes, Job* job) {
  const ReadBytes read = TakeSorted();
  const std::vector<ReadDigest>& digests = read.digests;
  const auto check = [&](const DigestedRange& storage) -> Status {
    const uint64_t begin = storage.range.begin, end = storage.range.end;
    const auto at = std::partition_point(
        digests.begin(), digests.end(), [&](const ReadDigest& digest) {
          return digest.file != storage.file ? digest.file < storage.file
                                             : digest.offset < begin;
        });
    std::optional<uint32_t> crc =
        Joined(digests, static_cast<size_t>(at - digests.begin()), storage.file,
               begin, end);
    if (!crc && wholes == Wholes::kAtOnce) return {};
    if (!crc) {
      TC_RETURN_IF_ERROR(
          files->Read(storage.file, [&](const ByteSource& source) -> Status {
            TC_ASSIGN_OR_RETURN(crc, Crc32OfRange(source, storage.range, job));
            return {};
          }));
    }
    if (*crc == storage.crc32) return {};
    return files_.Explain(
        Corrupt("the entry of the archive at bytes " + std::to_string(begin) +
                " to " + std::to_string(end) + " does not match its CRC-32")
            .WithFile(files_.path() + "/" + files_.files()[storage.file].name));
  };
  return ForEachItem(static_cast<int>(workers_.size()),
                     static_cast<int64_t>(read.storages.size()), job,
                     [&](int64_t i, int) -> Status {
                       return check(read.storages[static_cast<size_t>(i)]);
                     });
}

Status InputDigests::Check(OpenFiles* files, Wholes wholes, Job* job) {
  return files_.has_digests() ? CheckSegments(files, job)
                              : CheckStorages(files, wholes, job);
}

}  // namespace torch_ckpt
