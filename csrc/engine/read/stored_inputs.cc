#include "engine/read/stored_inputs.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/byte_range.h"
#include "base/checked.h"
#include "os/fault.h"
#include "plan/clip.h"
#include "plan/copy_run.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Needed ranges closer than this are read as one, unless what is between them
// is to be compared, and others may read it as well.
constexpr uint64_t kMergeGap = uint64_t{64} << 10;
// Below this a run is not worth a digest of its own.
constexpr uint64_t kMinRow = uint64_t{64} << 10;

// What is read as one. readers: who wants what is in it.
struct Fetch {
  ByteRange bytes;
  Readers readers = Readers::kThisProcess;
};

// Appends the stretches that loops [level, outer) of `run` make of one of
// `span` bytes at `at`.
void AddStretches(const Run& run, int level, int outer, uint64_t at,
                  uint64_t span, std::vector<ByteRange>* out) {
  if (level == outer) {
    out->push_back({at, at + span});
    return;
  }
  const auto l = static_cast<size_t>(level);
  const auto stride = static_cast<uint64_t>(run.src_stride[l]);
  const int64_t count = stride == 0 ? 1 : run.count[l];
  for (int64_t i = 0; i < count; ++i, at += stride) {
    AddStretches(run, level + 1, outer, at, span, out);
  }
}

// Appends what `run` needs of its file, as one where gaps are not above `gap`.
// Of a dense box the gaps of an outer loop are the larger ones, so that this
// makes no more stretches than a piece has gaps.
void AddStretches(const Run& run, uint64_t gap, std::vector<ByteRange>* out) {
  int outer = run.loops;
  uint64_t span = run.bytes;
  for (; outer > 0; --outer) {
    const auto l = static_cast<size_t>(outer - 1);
    const auto stride = static_cast<uint64_t>(run.src_stride[l]);
    if (stride > span + gap) break;
    span += static_cast<uint64_t>(run.count[l] - 1) * stride;
  }
  AddStretches(run, 0, outer, run.src, span, out);
}

// Those of one file among sorted ones.
std::span<const DigestedRange> StoragesOf(std::span<const DigestedRange> sorted,
                                          uint32_t file) {
  const auto [first, last] =
      std::equal_range(sorted.begin(), sorted.end(), DigestedRange{file, {}, 0},
                       [](const DigestedRange& a, const DigestedRange& b) {
                         return a.file < b.file;
                       });
  return {first, last};
}

// One call of Read, until it has come to an end or must begin again.
class ReadPass {
 public:
  ReadPass(const ByteSource& source, const WantedRuns& wanted, Wholes wholes,
           const InputDigests& digests, MutableByteSpan scratch,
           const ArenaLease* absent)
      : source_(source),
        runs_(wanted.runs),
        output_(wanted.output),
        digests_(digests),
        file_(wanted.file),
        wholes_(wholes),
        segments_(digests.SegmentsOf(wanted.file)),
        storages_(digests.of_archives()
                      ? StoragesOf(wanted.storages, wanted.file)
                      : std::span<const DigestedRange>()),
        scratch_(scratch),
        absent_(absent),
        shared_(wanted.shared),
        neighbours_(wanted.neighbours) {
    for (const ReadRun& read : runs_) needed_ += read.run.TotalBytes();
  }

  Status ReadAll() {
    std::vector<Fetch> fetches = Fetches();
    for (Fetch& fetch : fetches) {
      read_ += fetch.bytes.size();
      if (shared_) fetch.readers = Readers::kSeveral;
    }
    if (neighbours_ && !shared_) fetches = WithReaders(fetches);
    // A test has one left out, to see that this is noticed below.
    size_t next = FaultPoint("piece", source_.path()).skip ? 1 : 0;
    for (; next < fetches.size(); ++next) {
      TC_RETURN_IF_ERROR(Read(fetches[next]));
    }
    if (delivered_ == needed_) return {};
    return Internal("delivered " + std::to_string(delivered_) + " of " +
                    std::to_string(needed_) +
                    " bytes: this is a bug of torch_ckpt")
        .WithFile(source_.path());
  }

  // What it has found out. Of a pass that has come to its end: what is counted
  // before is that of bytes that may be read anew.
  void HandOver(int worker, InputDigests* digests) {
    for (const auto& [cast, lost] : lost_) cast->AddLost(lost);
    digests->Keep(worker, passed_);
    if (!output_) return;
    output_->rows.insert(output_->rows.end(), rows_.begin(), rows_.end());
  }
  uint64_t delivered() const { return delivered_; }
  uint64_t bytes_read() const { return read_; }
  uint64_t bytes_verified() const { return verified_; }

 private:
  // What to read, apart and ascending, each at most kFetchBytes: whole segments
  // when they are compared at once, else what is needed with small gaps filled.
  std::vector<Fetch> Fetches() const {
    const bool whole = segments_ && wholes_ == Wholes::kAtOnce;
    const bool alone = segments_ || wholes_ == Wholes::kLater;
    const uint64_t gap = alone ? 0 : kMergeGap;
    std::vector<ByteRange> stretches;
    std::vector<Fetch> fetches;
    for (const ReadRun& read : runs_) {
      AddStretches(read.run, whole ? kSegmentBytes : kMergeGap, &stretches);
    }
    std::sort(stretches.begin(), stretches.end(),
              [](const ByteRange& a, const ByteRange& b) {
                return a.begin < b.begin;
              });
    for (const ByteRange& stretch : stretches) {
      uint64_t lo = stretch.begin, hi = stretch.end;
      if (whole) {
        lo = RoundDown(lo, kSegmentBytes);
        hi = std::min(RoundUp(hi, kSegmentBytes), segments_->bytes);
      }
      if (!fetches.empty()) {
        ByteRange& last = fetches.back().bytes;
        lo = std::max(lo, last.end);
        if (lo <= last.end + gap && hi <= last.begin + kFetchBytes) {
          last.end = std::max(last.end, hi);
          continue;
        }
      }
      for (; lo < hi; lo += kFetchBytes) {
        fetches.push_back({{lo, std::min(lo + kFetchBytes, hi)}});
      }
    }
    return fetches;
  }

  // The same with who reads it: of a segment, or a stretch that is read as one,
  // of which a fifth or more is not needed here, that is for neighbours.
  std::vector<Fetch> WithReaders(const std::vector<Fetch>& fetches) const {
    std::vector<Fetch> cut;
    for (const Fetch& fetch : fetches) {
      for (uint64_t lo = fetch.bytes.begin; lo < fetch.bytes.end;) {
        const uint64_t end = RoundDown(lo, kSegmentBytes) + kSegmentBytes;
        const uint64_t hi =
            segments_ ? std::min(fetch.bytes.end, end) : fetch.bytes.end;
        cut.push_back({{lo, hi}});
        lo = hi;
      }
    }
    std::vector<double> needed(cut.size());
    for (const ReadRun& read : runs_) {
      const uint64_t begin = read.run.src, end = begin + read.run.SrcSpan();
      if (begin == end) continue;
      // As if what a run needs of its span were the same everywhere.
      const double density = static_cast<double>(read.run.TotalBytes()) /
                             static_cast<double>(end - begin);
      const auto first = std::partition_point(
          cut.begin(), cut.end(),
          [&](const Fetch& each) { return each.bytes.end <= begin; });
      for (auto at = static_cast<size_t>(first - cut.begin());
           at < cut.size() && cut[at].bytes.begin < end; ++at) {
        const uint64_t overlap = std::min(cut[at].bytes.end, end) -
                                 std::max(cut[at].bytes.begin, begin);
        needed[at] += density * static_cast<double>(overlap);
      }
    }
    std::vector<Fetch> joined;
    for (size_t i = 0; i < cut.size(); ++i) {
      Fetch next = cut[i];
      const auto size = static_cast<double>(next.bytes.size());
      if (needed[i] <= size * 4 / 5) next.readers = Readers::kSeveral;
      Fetch* const last = joined.empty() ? nullptr : &joined.back();
      if (last && last->bytes.end == next.bytes.begin &&
          last->readers == next.readers &&
          next.bytes.end <= last->bytes.begin + kFetchBytes) {
        last->bytes.end = next.bytes.end;
      } else {
        joined.push_back(next);
      }
    }
    return joined;
  }

  // Runs that end at or before `lo` are done with.
  void SkipTo(uint64_t lo) {
    for (; first_ < runs_.size(); ++first_) {
      const Run& run = runs_[first_].run;
      if (run.src + run.SrcSpan() > lo) break;
    }
  }

  // The one that copies all of [at, *hi) by itself to contiguous memory. Of an
  // output this ends where a segment of it does.
  const ReadRun* Sole(uint64_t at, uint64_t* hi) const {
    for (size_t i = first_; i < runs_.size(); ++i) {
      const Run& run = runs_[i].run;
      if (run.src > at) break;
      if (runs_[i].cast || run.loops > 0 || run.src + run.bytes < *hi) continue;
      if (!output_) return &runs_[i];
      if (run.bytes < kMinRow) continue;
      const uint64_t in_output = run.dst + (at - run.src) - output_->origin;
      *hi = std::min(*hi, at + kSegmentBytes - in_output % kSegmentBytes);
      return &runs_[i];
    }
    return nullptr;
  }

  // In steps, none of which is in two segments: what was just read is still in
  // the CPU's cache for the digest and the copies.
  Status Read(const Fetch& fetch) {
    const auto [begin, end] = fetch.bytes;
    if (fetch.readers == Readers::kSeveral) source_.ReadAhead(begin, end);
    TC_RETURN_IF_ERROR(MakePresent(kDigestStep));
    StepReader steps(source_, end, scratch_, fetch.readers);
    for (uint64_t at = begin; at < end;) {
      uint64_t hi = std::min(at + uint64_t{kDigestStep}, end);
      if (segments_) {
        hi = std::min(hi, RoundDown(at, kSegmentBytes) + kSegmentBytes);
      }
      SkipTo(at);
      const ReadRun* const sole = Sole(at, &hi);
      TC_ASSIGN_OR_RETURN(const std::byte* bytes, steps.Next(at, hi - at));
      if (!bytes) {
        TC_RETURN_IF_ERROR(MakePresent(end - at));
        TC_RETURN_IF_ERROR(steps.FetchRest(at));
        continue;
      }
      SumStorages(at, hi, bytes);
      uint32_t crc = 0;
      if (sole) {
        const uint64_t dst = sole->run.dst + (at - sole->run.src);
        // Faster than reading straight into the target, digest and all.
        crc = Crc32cCopy(0, reinterpret_cast<std::byte*>(dst), bytes, hi - at);
        if (output_) rows_.push_back({dst, hi - at, crc});
        delivered_ += hi - at;
      } else if (segments_) {
        crc = Crc32c(0, bytes, hi - at);
      }
      if (segments_) TC_RETURN_IF_ERROR(AddOfSegment(at, hi - at, crc));
      DeliverAll(at, hi, bytes, sole);
      at = hi;
    }
    return {};
  }

  // The pages of the scratch that a read of `bytes` needs.
  Status MakePresent(uint64_t bytes) const {
    if (!absent_) return {};
    return absent_->MakePresent(
        0, std::min(bytes + ByteSource::kSlack, uint64_t{scratch_.size()}));
  }

  // Bytes of one segment, which is compared when it is whole.
  Status AddOfSegment(uint64_t at, uint64_t size, uint32_t crc) {
    digests_.Append({file_, crc, at, size}, &passed_);
    const ReadDigest& last = passed_.digests.back();
    if (last.offset % kSegmentBytes != 0) return {};
    const uint64_t end =
        std::min(last.offset + kSegmentBytes, segments_->bytes);
    if (last.offset + last.size != end) return {};
    TC_RETURN_IF_ERROR(CheckSegment(*segments_, last.offset, last.crc)
                           .WithFile(source_.path()));
    verified_ += last.size;
    passed_.digests.pop_back();
    return {};
  }

  // Takes the CRC-32 of what each storage has in [lo, hi) of `bytes`.
  void SumStorages(uint64_t lo, uint64_t hi, const std::byte* bytes) {
    auto storage = std::partition_point(
        storages_.begin(), storages_.end(),
        [&](const DigestedRange& each) { return each.range.end <= lo; });
    for (; storage != storages_.end() && storage->range.begin < hi; ++storage) {
      const uint64_t from = std::max(lo, storage->range.begin);
      const uint64_t to = std::min(hi, storage->range.end);
      const uint32_t crc = Crc32(0, bytes + (from - lo), to - from);
      digests_.Append({file_, crc, from, to - from}, &passed_);
      InputDigests::AppendStorage(*storage, &passed_);
    }
  }

  // To every run but `done`, which has the bytes already.
  void DeliverAll(uint64_t lo, uint64_t hi, const std::byte* bytes,
                  const ReadRun* done) {
    for (size_t i = first_; i < runs_.size(); ++i) {
      if (runs_[i].run.src >= hi) break;
      if (&runs_[i] != done) Deliver(runs_[i], lo, hi, bytes);
    }
  }

  // What the run has in [lo, hi) from `bytes`, which hold that range.
  void Deliver(const ReadRun& read, uint64_t lo, uint64_t hi,
               const std::byte* bytes) {
    clipped_.clear();
    ClipRun(read.run, lo, hi, &clipped_);
    for (const Run& inside : clipped_) {
      delivered_ += inside.TotalBytes();
      if (!read.cast) {
        CopyRun(inside, bytes, lo, reinterpret_cast<std::byte*>(inside.dst),
                inside.dst);
        continue;
      }
      const uint64_t lost =
          read.cast->Deliver(file_, inside, bytes + (inside.src - lo));
      if (lost > 0) lost_[read.cast] += lost;
    }
  }

  const ByteSource& source_;
  const std::span<const ReadRun> runs_;
  DigestedOutput* const output_;
  const InputDigests& digests_;
  const uint32_t file_;
  const Wholes wholes_;
  const ManifestFile* const segments_;
  const std::span<const DigestedRange> storages_;
  const MutableByteSpan scratch_;
  const ArenaLease* const absent_;
  const bool shared_, neighbours_;
  ReadBytes passed_;
  std::vector<Run> clipped_;
  std::map<CastTarget*, uint64_t> lost_;
  std::vector<DigestedOutput::Row> rows_;
  size_t first_ = 0;  // of the runs that still need bytes
  uint64_t needed_ = 0, read_ = 0, verified_ = 0, delivered_ = 0;
};

}  // namespace

StoredInputs::StoredInputs(std::shared_ptr<OpenFiles> files, bool verify,
                           int workers, Wholes wholes)
    : files_(std::move(files)),
      wholes_(wholes),
      used_(files_->set().files().size()),
      digests_(files_->set(), verify, workers) {}

Result<uint64_t> StoredInputs::Read(int worker, const WantedRuns& wanted,
                                    MutableByteSpan scratch,
                                    const ArenaLease* absent) {
  used_[wanted.file] = true;
  uint64_t delivered = 0;
  TC_RETURN_IF_ERROR(
      files_->Read(wanted.file, [&](const ByteSource& source) -> Status {
        ReadPass pass(source, wanted, wholes_, digests_, scratch, absent);
        TC_RETURN_IF_ERROR(pass.ReadAll());
        pass.HandOver(worker, &digests_);
        read_ += pass.bytes_read();
        verified_ += pass.bytes_verified();
        delivered = pass.delivered();
        return {};
      }));
  return delivered;
}

Status StoredInputs::Check(Job* job) {
  std::vector<uint32_t> used;
  for (uint32_t file = 0; file < used_.size(); ++file) {
    if (used_[file]) used.push_back(file);
  }
  TC_RETURN_IF_ERROR(files_->set().CheckUnchanged(used));
  return digests_.Check(files_.get(), wholes_, job);
}

}  // namespace torch_ckpt
