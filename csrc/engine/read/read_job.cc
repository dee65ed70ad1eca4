#include "engine/read/read_job.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <span>

#include "base/checked.h"
#include "engine/open/open_files.h"
#include "engine/read/read_plan.h"
#include "os/fault.h"
#include "plan/clip.h"
#include "plan/copy_run.h"
#include "runtime/arena.h"
#include "runtime/crc32.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// Needed ranges closer than this are read as one. With digests, which need
// whole segments, those that leave none out between them.
constexpr uint64_t kMergeGap = uint64_t{64} << 10;
constexpr uint64_t kScratchBytes = kCellBytes + ByteSource::kSlack;

struct Range {
  uint64_t lo, hi;
};

// Appends the stretches that loops [level, outer) of `run` make of one of
// `span` bytes at `at`.
void AddStretches(const Run& run, int level, int outer, uint64_t at,
                  uint64_t span, std::vector<Range>* out) {
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
// makes no more stretches than a cell has gaps.
void AddStretches(const Run& run, uint64_t gap, std::vector<Range>* out) {
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

uint64_t BytesOf(const ReadCell& cell) {
  uint64_t bytes = 0;
  for (const ReadRun& read : cell.runs) bytes += read.run.TotalBytes();
  return bytes;
}

// One cell at a time, on one thread.
class CellReader {
 public:
  // `digests`: of the manifest, null where what is read is not compared with
  // them. `storages`: those of the file whose CRC-32s are wanted, sorted.
  // `neighbours`, see ReadPlan.
  CellReader(const ByteSource& file, const ManifestFile* digests,
             std::span<const DigestedRange> storages, uint64_t file_bytes,
             bool neighbours, MutableByteSpan scratch)
      : file_(file),
        digests_(digests),
        storages_(storages),
        file_bytes_(file_bytes),
        neighbours_(neighbours),
        scratch_(scratch) {}

  Status Read(const ReadCell& cell) {
    const std::vector<Range> ranges = Ranges(cell);
    readers_ = ReadersOf(cell, ranges);
    // A test has one left out, to see that this is noticed below.
    size_t next = FaultPoint("cell", file_.path()).skip ? 1 : 0;
    for (; next < ranges.size(); ++next) {
      TC_RETURN_IF_ERROR(ReadRange(cell, ranges[next]));
    }
    if (delivered_ == BytesOf(cell)) return {};
    return Internal("delivered " + std::to_string(delivered_) + " of " +
                    std::to_string(BytesOf(cell)) + " bytes from byte " +
                    std::to_string(cell.begin) +
                    " on: this is a bug of torch_ckpt")
        .WithFile(file_.path());
  }
  // Of a cell that was read: what is counted before is that of bytes that may
  // be read anew.
  void CountLost() const {
    for (const auto& [cast, lost] : lost_) cast->AddLost(lost);
  }
  // The same of CRC-32s.
  void AddSums(int worker, uint32_t file, InputDigests* to) const {
    for (const Summed& each : sums_) {
      to->Add(worker, file, each.offset, each.crc32, each.bytes);
    }
  }
  uint64_t bytes_read() const { return read_; }
  uint64_t bytes_verified() const { return verified_; }

 private:
  struct Summed {
    uint64_t offset, bytes;
    uint32_t crc32;
  };

  // What to read: whole segments when they are verified, else what is needed
  // with small gaps filled.
  std::vector<Range> Ranges(const ReadCell& cell) const {
    const uint64_t gap = digests_ ? 0 : kMergeGap;
    std::vector<Range> stretches, ranges;
    for (const ReadRun& read : cell.runs) {
      AddStretches(read.run, digests_ ? kSegmentBytes : kMergeGap, &stretches);
    }
    std::sort(stretches.begin(), stretches.end(),
              [](const Range& a, const Range& b) { return a.lo < b.lo; });
    for (Range range : stretches) {
      if (digests_) {
        range.lo = RoundDown(range.lo, kSegmentBytes);
        range.hi = std::min(RoundUp(range.hi, kSegmentBytes), file_bytes_);
      }
      if (!ranges.empty() && range.lo <= ranges.back().hi + gap) {
        ranges.back().hi = std::max(ranges.back().hi, range.hi);
      } else {
        ranges.push_back(range);
      }
    }
    return ranges;
  }

  // Edges that are shared weigh little in large shards, and make up most of
  // what is read of small ones.
  Readers ReadersOf(const ReadCell& cell,
                    const std::vector<Range>& ranges) const {
    const uint64_t needed = BytesOf(cell);
    uint64_t read = 0;
    for (const Range& range : ranges) read += range.hi - range.lo;
    const bool shared =
        cell.shared || (neighbours_ && read > needed + needed / 4);
    return shared ? Readers::kSeveral : Readers::kThisProcess;
  }

  // The digest of the segment that starts at `lo` is `digest`.
  Status Check(uint64_t lo, uint64_t size, uint32_t digest) {
    if (!digests_) return {};
    verified_ += size;
    if (digest == digests_->crc32c[lo / kSegmentBytes]) return {};
    return Corrupt("bytes " + std::to_string(lo) + " to " +
                   std::to_string(lo + size) +
                   " do not match their CRC-32C: the file was altered or the "
                   "disk returned wrong data")
        .WithFile(file_.path());
  }

  // Runs of the cell that end at or before `lo` are done with.
  void SkipTo(const ReadCell& cell, uint64_t lo) {
    for (; first_ < cell.runs.size(); ++first_) {
      const Run& run = cell.runs[first_].run;
      if (run.src + run.SrcSpan() > lo) break;
    }
  }

  // The one that copies all of [lo, hi) by itself to contiguous memory.
  const ReadRun* Sole(const ReadCell& cell, uint64_t lo, uint64_t hi) const {
    for (size_t i = first_; i < cell.runs.size(); ++i) {
      const ReadRun& read = cell.runs[i];
      const Run& run = read.run;
      if (run.src > lo) break;
      if (!read.cast && run.loops == 0 && run.src + run.bytes >= hi) {
        return &read;
      }
    }
    return nullptr;
  }

  // Segment by segment, and those in steps: what was just read is still in the
  // CPU's cache for the digest and the copies.
  Status ReadRange(const ReadCell& cell, const Range& range) {
    if (readers_ == Readers::kSeveral) file_.ReadAhead(range.lo, range.hi);
    StepReader steps(file_, range.hi, scratch_, readers_);
    for (uint64_t lo = range.lo; lo < range.hi;) {
      const uint64_t end =
          std::min(RoundDown(lo, kSegmentBytes) + kSegmentBytes, range.hi);
      uint32_t digest = 0;
      for (uint64_t at = lo; at < end;) {
        const uint64_t hi = std::min<uint64_t>(at + kDigestStep, end);
        SkipTo(cell, at);
        const ReadRun* sole = Sole(cell, at, hi);
        std::byte* const target =
            sole ? reinterpret_cast<std::byte*>(sole->run.dst) +
                       (at - sole->run.src)
                 : nullptr;
        TC_ASSIGN_OR_RETURN(const std::byte* bytes, steps.Next(at, hi - at));
        Sum(at, hi, bytes);
        if (target) {
          // Faster than reading straight into the target, digest and all.
          digest = Crc32cCopy(digest, target, bytes, hi - at);
          delivered_ += hi - at;
        } else if (digests_) {
          digest = Crc32c(digest, bytes, hi - at);
        }
        DeliverAll(cell, at, hi, bytes, sole);
        at = hi;
      }
      TC_RETURN_IF_ERROR(Check(lo, end - lo, digest));
      lo = end;
    }
    read_ += range.hi - range.lo;
    return {};
  }

  // Takes the CRC-32 of what each storage has in [lo, hi) of `bytes`.
  void Sum(uint64_t lo, uint64_t hi, const std::byte* bytes) {
    auto storage = std::partition_point(
        storages_.begin(), storages_.end(), [&](const DigestedRange& each) {
          return each.range.offset + each.range.bytes <= lo;
        });
    for (; storage != storages_.end() && storage->range.offset < hi;
         ++storage) {
      const uint64_t from = std::max(lo, storage->range.offset);
      const uint64_t to =
          std::min(hi, storage->range.offset + storage->range.bytes);
      sums_.push_back(
          {from, to - from, Crc32(0, bytes + (from - lo), to - from)});
    }
  }

  // To every run but `done`, which has the bytes already.
  void DeliverAll(const ReadCell& cell, uint64_t lo, uint64_t hi,
                  const std::byte* bytes, const ReadRun* done) {
    for (size_t i = first_; i < cell.runs.size(); ++i) {
      const ReadRun& read = cell.runs[i];
      if (read.run.src >= hi) break;
      if (&read != done) Deliver(read, lo, hi, bytes);
    }
  }

  // What the run has in [lo, hi) from `bytes`, which hold that range.
  void Deliver(const ReadRun& read, uint64_t lo, uint64_t hi,
               const std::byte* bytes) {
    parts_.clear();
    ClipRun(read.run, lo, hi, &parts_);
    for (const Run& part : parts_) {
      delivered_ += part.TotalBytes();
      if (!read.cast) {
        CopyRun(part, bytes, lo, reinterpret_cast<std::byte*>(part.dst),
                part.dst);
        continue;
      }
      const uint64_t lost = read.cast->Deliver(part, bytes + (part.src - lo));
      if (lost > 0) lost_[read.cast] += lost;
    }
  }

  const ByteSource& file_;
  const ManifestFile* digests_;
  const std::span<const DigestedRange> storages_;
  const uint64_t file_bytes_;
  const bool neighbours_;
  const MutableByteSpan scratch_;
  Readers readers_ = Readers::kThisProcess;
  std::vector<Run> parts_;
  std::map<CastTarget*, uint64_t> lost_;
  std::vector<Summed> sums_;
  size_t first_ = 0;  // of the cell's runs that still need bytes
  uint64_t read_ = 0, verified_ = 0, delivered_ = 0;
};

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

// Each once.
std::vector<uint32_t> FilesOf(const PlannedReads& planned) {
  std::vector<uint32_t> files;
  for (size_t cell = 0; cell < planned.size(); ++cell) {
    const uint32_t file = planned.FileOf(cell);
    if (files.empty() || files.back() != file) files.push_back(file);
  }
  return files;
}

}  // namespace

Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, InputDigests* shared) {
  const auto files = checkpoint->LendFiles(plan.direct_io);
  TC_ASSIGN_OR_RETURN(PlannedReads planned,
                      PlannedReads::Make(*checkpoint, plan.items, targets));
  ReadReport report;
  report.bytes_needed = planned.bytes();
  job->AddTotal(report.bytes_needed);
  // Files without an id inside are small, and only their digests tell them
  // from those of another save.
  const auto digests = [&](const ManifestFile& file) {
    return files->set().has_digests() &&
           (plan.verify || file.container != Container::kSafetensors);
  };
  const int workers = static_cast<int>(
      std::min<size_t>(static_cast<size_t>(std::max(1, plan.workers)),
                       std::max<size_t>(1, planned.size())));
  InputDigests own(workers, ArchivesOf(files->set(), plan.verify));
  InputDigests* const sums = shared ? shared : &own;
  if (sums->kind() == DigestKind::kNone) planned.storages().clear();
  const std::span<const DigestedRange> storages = planned.storages();
  sums->Expect(0, storages);
  std::atomic<uint64_t> read{0}, verified{0};
  TC_RETURN_IF_ERROR(ForEachItem(
      workers, static_cast<int64_t>(planned.size()), job,
      [&](int64_t i, int worker) -> Status {
        const ReadCell cell = planned.Cell(static_cast<size_t>(i));
        // For one cell at a time: more workers than the budget holds just wait.
        TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                            LeaseBuffer(kScratchBytes, job));
        const ManifestFile& listed = checkpoint->files()[cell.file];
        TC_RETURN_IF_ERROR(files->Read(cell.file, [&](const ByteSource& file) {
          CellReader reader(file, digests(listed) ? &listed : nullptr,
                            StoragesOf(storages, cell.file), listed.bytes,
                            plan.neighbours, lease.span());
          Status status = reader.Read(cell);
          if (!status.ok()) return status;
          reader.CountLost();
          reader.AddSums(worker, cell.file, sums);
          read += reader.bytes_read();
          verified += reader.bytes_verified();
          return Status();
        }));
        job->AddDone(BytesOf(cell));
        return {};
      }));
  TC_RETURN_IF_ERROR(files->set().CheckUnchanged(FilesOf(planned)));
  TC_RETURN_IF_ERROR(own.Check(files.get(), Untiled::kPassedOver, job));
  for (CastTarget& cast : planned.casts()) TC_RETURN_IF_ERROR(cast.Finish());
  report.bytes_read = read;
  report.bytes_verified = verified;
  return report;
}

}  // namespace torch_ckpt
