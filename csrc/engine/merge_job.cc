#include "engine/merge_job.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "engine/input_digests.h"
#include "engine/open_files.h"
#include "engine/stored_box.h"
#include "format/cast.h"
#include "plan/copy_run.h"
#include "plan/ranges.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

struct SourceRun {
  uint32_t file;
  Run run;  // src: file offset; dst: offset in the output buffer
};

// A stretch of an output buffer that was digested while it was copied there.
struct DigestedStretch {
  uint64_t dst, size;
  uint32_t crc;
};

// Below this, combining two digests costs as much as making one of the bytes.
constexpr uint64_t kMinStretch = uint64_t{64} << 10;

uint64_t SegmentEnd(uint64_t offset) {
  return RoundDown(offset, kSegmentBytes) + kSegmentBytes;
}

bool DenseSource(const Run& run) { return run.SrcSpan() == run.TotalBytes(); }

}  // namespace

class Merger {
 public:
  Merger(const MergePlan& plan, int workers)
      : plan_(plan),
        files_(plan.checkpoint_, plan.options_.output.direct_io),
        digests_(workers),
        works_(static_cast<size_t>(workers)) {}

  Status Fill(size_t output, MutableByteSpan out, MutableByteSpan scratch,
              int worker, SegmentDigester* digester) {
    const uint64_t offset = digester->offset();
    const MergePlan::Layout& layout = plan_.layouts_[output];
    auto extent = ExtentAt(layout, offset);
    Work& work = works_[static_cast<size_t>(worker)];
    std::vector<SourceRun>& runs = work.runs;
    runs.clear();
    work.digested.clear();
    work.casts.clear();
    const uint64_t end = offset + out.size();
    for (uint64_t at = offset; at < end; at = extent->end, ++extent) {
      const uint64_t from = at - extent->begin;
      const uint64_t to = std::min(end, extent->end) - extent->begin;
      const uint64_t dst = at - offset;
      switch (extent->kind) {
        case MergePlan::Extent::kHeader:
          std::memcpy(out.data() + dst, layout.header.data() + from, to - from);
          break;
        case MergePlan::Extent::kFile: {
          Run run;
          run.src = extent->from + from;
          run.dst = dst;
          run.bytes = to - from;
          runs.push_back({extent->index, run});
          break;
        }
        case MergePlan::Extent::kTensor:
          if (extent->cast) {
            work.casts.push_back({&*extent, from, out.subspan(dst, to - from)});
          } else {
            TC_RETURN_IF_ERROR(PlanRange(extent->index, from, to, dst, &runs));
          }
          break;
      }
    }
    TC_RETURN_IF_ERROR(Execute({offset, out, &work.digested}, scratch, worker));
    for (const CastRange& range : work.casts) {
      TC_RETURN_IF_ERROR(Cast(range, scratch, worker));
    }
    Digest(out, &work.digested, digester);
    return {};
  }

  Status CheckInputs(Job* job) {
    TC_RETURN_IF_ERROR(files_.CheckUnchanged());
    return plan_.options_.verify
               ? digests_.Check(*plan_.checkpoint_, &files_, job)
               : plan_.checkpoint_->CheckCurrent();
  }

 private:
  // The one that byte `offset` of the output is in, or the next.
  static std::vector<MergePlan::Extent>::const_iterator ExtentAt(
      const MergePlan::Layout& layout, uint64_t offset) {
    return std::upper_bound(
        layout.extents.begin(), layout.extents.end(), offset,
        [](uint64_t at, const MergePlan::Extent& e) { return at < e.end; });
  }

  // Bytes of a tensor's output from `from` on, which are cast.
  struct CastRange {
    const MergePlan::Extent* extent;
    uint64_t from;
    MutableByteSpan out;
  };
  struct Work {  // of one worker
    std::vector<SourceRun> runs;
    std::vector<DigestedStretch> digested;
    std::vector<CastRange> casts;
  };
  // Where runs go: bytes of an output file from `offset` on, and what of them
  // is digested on the way; or, without that, memory of no file.
  struct Target {
    uint64_t offset;
    MutableByteSpan out;
    std::vector<DigestedStretch>* digested;
  };

  // Of an element of a tensor that is cast: as it is stored, and in the output.
  std::pair<uint64_t, uint64_t> ElementBytes(
      const MergePlan::Extent& extent) const {
    const CatalogEntry& entry =
        plan_.checkpoint_->catalog().entries()[extent.index];
    return {static_cast<uint64_t>(DtypeBits(entry.dtype)) / 8,
            static_cast<uint64_t>(DtypeBits(*extent.cast)) / 8};
  }

  // Gathers the elements as they are stored, and casts them from there.
  Status Cast(const CastRange& range, MutableByteSpan scratch, int worker) {
    const CatalogEntry& entry =
        plan_.checkpoint_->catalog().entries()[range.extent->index];
    const Dtype to = *range.extent->cast;
    const auto [in, out] = ElementBytes(*range.extent);
    if (range.from % out != 0 || range.out.size() % out != 0) {
      // Tensors stand at multiples of their elements, and pieces are cut at
      // multiples of 4096.
      return Internal("a cast would cut an element")
          .WithTensor(std::string(entry.name));
    }
    const MutableByteSpan elements = scratch.last(kPieceBytes);
    const MutableByteSpan rest = scratch.first(scratch.size() - kPieceBytes);
    const uint64_t count = range.out.size() / out;
    const uint64_t most = kPieceBytes / in;
    std::vector<SourceRun>& runs = works_[static_cast<size_t>(worker)].runs;
    for (uint64_t at = 0; at < count; at += most) {
      const uint64_t size = std::min(most, count - at);
      const uint64_t first = range.from / out + at;
      runs.clear();
      TC_RETURN_IF_ERROR(PlanRange(range.extent->index, first * in,
                                   (first + size) * in, 0, &runs));
      TC_RETURN_IF_ERROR(
          Execute({0, elements.first(size * in), nullptr}, rest, worker));
      CastElements(entry.dtype, elements.data(), to,
                   range.out.data() + at * out, size);
    }
    return {};
  }

  // Runs for bytes [from, to) of the tensor, in row-major order of the whole.
  Status PlanRange(uint32_t entry_id, uint64_t from, uint64_t to, uint64_t dst,
                   std::vector<SourceRun>* runs) {
    const Catalog& catalog = plan_.checkpoint_->catalog();
    const CatalogEntry& entry = catalog.entries()[entry_id];
    TC_ASSIGN_OR_RETURN(const UnitView whole, InUnits(entry.dtype, entry.shape,
                                                      Box::Whole(entry.shape)));
    const auto unit = static_cast<uint64_t>(whole.unit_bytes);
    const Dims strides = DenseStrides(whole.shape, whole.unit_bytes);
    // A piece may cut a unit only where the layout is not aligned to it
    // (3-byte units): such edges are a few bytes of one placement each.
    if (from % unit != 0) {
      const uint64_t cut = std::min(to, from / unit * unit + unit);
      TC_RETURN_IF_ERROR(
          PlanCutUnit(entry, entry_id, whole, from, cut, dst, runs));
      dst += cut - from;
      from = cut;
    }
    if (to % unit != 0 && from < to) {
      const uint64_t cut = to / unit * unit;
      TC_RETURN_IF_ERROR(PlanCutUnit(entry, entry_id, whole, cut, to,
                                     dst + (cut - from), runs));
      to = cut;
    }
    if (from == to) return {};
    const std::vector<Box> boxes =
        BoxesOfRange(whole.shape, static_cast<int64_t>(from / unit),
                     static_cast<int64_t>(to / unit));
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        plan_.checkpoint_->Placements(entry_id));
    for (const Placement& placement : placements) {
      if (placement.role == PlacementRole::kReplica) continue;
      TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                          StoredBoxes(entry, placement));
      for (const StridedBox& src : stored) {
        for (const Box& box : boxes) {
          uint64_t linear = 0;
          for (int d = 0; d < box.rank(); ++d) {
            linear += static_cast<uint64_t>(box.offsets[d] * strides[d]);
          }
          Run run;
          if (MakeRun(src, {box, dst + linear - from, strides},
                      whole.unit_bytes, &run)) {
            runs->push_back({placement.file, run});
          }
        }
      }
    }
    return {};
  }

  // Bytes [from, to) inside one unit of the tensor.
  Status PlanCutUnit(const CatalogEntry& entry, uint32_t entry_id,
                     const UnitView& whole, uint64_t from, uint64_t to,
                     uint64_t dst, std::vector<SourceRun>* runs) {
    const auto unit = static_cast<uint64_t>(whole.unit_bytes);
    const auto linear = static_cast<int64_t>(from / unit);
    const Box one = BoxesOfRange(whole.shape, linear, linear + 1)[0];
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        plan_.checkpoint_->Placements(entry_id));
    for (const Placement& placement : placements) {
      if (placement.role == PlacementRole::kReplica) continue;
      TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                          StoredBoxes(entry, placement));
      for (const StridedBox& src : stored) {
        Run run;
        if (!MakeRun(src, {one, dst, DenseStrides(one.sizes, whole.unit_bytes)},
                     whole.unit_bytes, &run)) {
          continue;
        }
        run.src += from % unit;
        run.bytes = to - from;
        runs->push_back({placement.file, run});
        return {};
      }
    }
    return Internal("no placement holds a unit")
        .WithTensor(std::string(entry.name));
  }

  // Reads file by file in ascending order; runs that stand one after another
  // in a file are fetched together.
  Status Execute(const Target& target, MutableByteSpan scratch, int worker) {
    std::vector<SourceRun>& runs = works_[static_cast<size_t>(worker)].runs;
    std::sort(
        runs.begin(), runs.end(), [](const SourceRun& a, const SourceRun& b) {
          return a.file != b.file ? a.file < b.file : a.run.src < b.run.src;
        });
    for (size_t i = 0; i < runs.size();) {
      size_t last = i + 1;
      uint64_t hi = runs[i].run.src + runs[i].run.SrcSpan();
      if (DenseSource(runs[i].run)) {
        while (last < runs.size() && runs[last].file == runs[i].file &&
               runs[last].run.src == hi && DenseSource(runs[last].run) &&
               hi + runs[last].run.SrcSpan() - runs[i].run.src <= kPieceBytes) {
          hi += runs[last].run.SrcSpan();
          ++last;
        }
      }
      const SourceRun& first = runs[i];
      const bool alone = last - i == 1 && first.run.loops == 0 &&
                         first.run.bytes >= kMinStretch;
      TC_RETURN_IF_ERROR(plan_.checkpoint_->Explain(
          alone ? Stream(first, target, scratch, worker)
                : Fetch(&first, last - i, hi, target.out, scratch, worker)));
      i = last;
    }
    return {};
  }

  // A run that stands in the output as in its file: one pass over memory copies
  // it and digests it for both, in steps that lie in one segment of either.
  Status Stream(const SourceRun& source_run, const Target& target,
                MutableByteSpan scratch, int worker) {
    const auto& [offset, out, digested] = target;
    const Run& run = source_run.run;
    TC_ASSIGN_OR_RETURN(const auto source, files_.Get(source_run.file));
    const uint64_t end = run.src + run.bytes;
    const std::byte* rest = nullptr;  // from `rest_at` to the end of the run
    uint64_t rest_at = 0;
    for (uint64_t at = run.src; at < end;) {
      const uint64_t dst = run.dst + (at - run.src);
      const uint64_t size =
          std::min({uint64_t{kDigestStep}, end - at, SegmentEnd(at) - at,
                    SegmentEnd(offset + dst) - (offset + dst)});
      const std::byte* bytes = scratch.data();
      if (!rest) {
        TC_ASSIGN_OR_RETURN(const uint64_t cached,
                            source->ReadCached(scratch.first(size), at));
        if (cached < size) {
          // The page cache gave out: one large read for what is left.
          TC_ASSIGN_OR_RETURN(rest, source->Read(at, end, scratch));
          rest_at = at;
        }
      }
      if (rest) bytes = rest + (at - rest_at);
      const uint32_t crc = Crc32cCopy(0, out.data() + dst, bytes, size);
      digests_.Add(worker, source_run.file, at, crc, size);
      if (digested) digested->push_back({dst, size, crc});
      at += size;
    }
    return {};
  }

  // Gives all of `out` to the digester; takes what was digested already.
  static void Digest(MutableByteSpan out,
                     std::vector<DigestedStretch>* digested,
                     SegmentDigester* digester) {
    std::sort(digested->begin(), digested->end(),
              [](const DigestedStretch& a, const DigestedStretch& b) {
                return a.dst < b.dst;
              });
    uint64_t at = 0;
    for (const DigestedStretch& stretch : *digested) {
      digester->Add(out.subspan(at, stretch.dst - at));
      digester->Add(stretch.crc, stretch.size);
      at = stretch.dst + stretch.size;
    }
    digester->Add(out.subspan(at));
  }

  Status Fetch(const SourceRun* group, size_t count, uint64_t hi,
               MutableByteSpan out, MutableByteSpan scratch, int worker) {
    const uint32_t file = group->file;
    const uint64_t lo = group->run.src;
    TC_ASSIGN_OR_RETURN(const auto source, files_.Get(file));
    if (count == 1 && group->run.loops == 0) {
      std::byte* into = out.data() + group->run.dst;
      TC_ASSIGN_OR_RETURN(const uint64_t cached,
                          source->ReadCached({into, hi - lo}, lo));
      if (cached == hi - lo) {
        digests_.Add(worker, file, lo, into, hi - lo);
        return {};
      }
    }
    if (hi - lo > kPieceBytes) {
      // A strided source that spans more than fits: window by window.
      digests_.Touch(worker, file, lo, hi);
      Status status;
      SplitBySrcSpan(group->run, kPieceBytes, [&](const Run& part) {
        if (status.ok()) status = FetchWindow(*source, part, out, scratch);
      });
      return status;
    }
    TC_ASSIGN_OR_RETURN(const std::byte* bytes, source->Read(lo, hi, scratch));
    if (count > 1 || DenseSource(group->run)) {
      digests_.Add(worker, file, lo, bytes, hi - lo);
    } else {
      digests_.Touch(worker, file, lo, hi);
    }
    for (size_t i = 0; i < count; ++i) {
      CopyRun(group[i].run, bytes, lo, out.data(), 0);
    }
    return {};
  }

  Status FetchWindow(const ByteSource& source, const Run& run,
                     MutableByteSpan out, MutableByteSpan scratch) {
    TC_ASSIGN_OR_RETURN(const std::byte* bytes,
                        source.Read(run.src, run.src + run.SrcSpan(), scratch));
    CopyRun(run, bytes, run.src, out.data(), 0);
    return {};
  }

  const MergePlan& plan_;
  OpenFiles files_;
  InputDigests digests_;
  std::vector<Work> works_;
};

Result<std::vector<std::vector<WrittenRange>>> RunMergeJob(
    const MergePlan& plan, const Directory& staging,
    const std::vector<OutputSpec>& outputs, Job* job) {
  Merger merger(plan, std::max(1, plan.options().output.workers));
  TC_ASSIGN_OR_RETURN(
      auto written,
      WriteOutputs(
          staging, outputs, plan.options().output, job,
          [&](size_t file, MutableByteSpan out, MutableByteSpan scratch,
              int worker, SegmentDigester* digester) {
            return merger.Fill(file, out, scratch, worker, digester);
          }));
  TC_RETURN_IF_ERROR(merger.CheckInputs(job));
  return written;
}

}  // namespace torch_ckpt
