#include "engine/write/stored_providers.h"

#include <algorithm>

#include "engine/open/stored_box.h"
#include "plan/ranges.h"

namespace torch_ckpt {
namespace {

// The runs of one tensor's bytes.
class TensorRuns {
 public:
  static Result<TensorRuns> Make(StoredTensor tensor,
                                 std::vector<StoredRun>* runs) {
    const CatalogEntry& entry = tensor.entry;
    TC_ASSIGN_OR_RETURN(const UnitView whole, InUnits(entry.dtype, entry.shape,
                                                      Box::Whole(entry.shape)));
    std::erase_if(tensor.placements, [](const Placement& placement) {
      return placement.role == PlacementRole::kReplica;
    });
    return TensorRuns(std::move(tensor), whole, runs);
  }

  // Adds those of bytes [from, to), which go to `dst`. A piece may cut a unit
  // only where the layout is not aligned to it (3-byte units): such edges are a
  // few bytes of one placement each.
  Status Add(uint64_t from, uint64_t to, uint64_t dst) {
    const auto unit = static_cast<uint64_t>(whole_.unit_bytes);
    if (from % unit != 0) {
      const uint64_t cut = std::min(to, from / unit * unit + unit);
      TC_RETURN_IF_ERROR(AddCutUnit(from, cut, dst));
      dst += cut - from;
      from = cut;
    }
    if (to % unit != 0 && from < to) {
      const uint64_t cut = to / unit * unit;
      TC_RETURN_IF_ERROR(AddCutUnit(cut, to, dst + (cut - from)));
      to = cut;
    }
    return from < to ? AddUnits(from, to, dst) : Status();
  }

 private:
  TensorRuns(StoredTensor tensor, UnitView whole, std::vector<StoredRun>* runs)
      : tensor_(std::move(tensor)), whole_(std::move(whole)), runs_(runs) {}

  Status AddUnits(uint64_t from, uint64_t to, uint64_t dst) {
    const Dims strides = DenseStrides(whole_.shape, whole_.unit_bytes);
    const int64_t unit = whole_.unit_bytes;
    const std::vector<Box> boxes =
        BoxesOfRange(whole_.shape, static_cast<int64_t>(from) / unit,
                     static_cast<int64_t>(to) / unit);
    for (const Placement& placement : tensor_.placements) {
      TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                          StoredBoxes(tensor_.entry, placement));
      for (const StridedBox& src : stored) {
        for (const Box& box : boxes) {
          uint64_t linear = 0;
          for (int d = 0; d < box.rank(); ++d) {
            linear += static_cast<uint64_t>(box.offsets[d] * strides[d]);
          }
          Run run;
          if (MakeRun(src, {box, dst + linear - from, strides}, unit, &run)) {
            runs_->push_back({placement.file, run});
          }
        }
      }
    }
    return {};
  }

  // Bytes [from, to) inside one unit.
  Status AddCutUnit(uint64_t from, uint64_t to, uint64_t dst) {
    const auto unit = static_cast<uint64_t>(whole_.unit_bytes);
    const auto linear = static_cast<int64_t>(from / unit);
    const Box one = BoxesOfRange(whole_.shape, linear, linear + 1)[0];
    const Dims strides = DenseStrides(one.sizes, whole_.unit_bytes);
    for (const Placement& placement : tensor_.placements) {
      TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                          StoredBoxes(tensor_.entry, placement));
      for (const StridedBox& src : stored) {
        Run run;
        if (!MakeRun(src, {one, dst, strides}, whole_.unit_bytes, &run)) {
          continue;
        }
        run.src += from % unit;
        run.bytes = to - from;
        runs_->push_back({placement.file, run});
        return {};
      }
    }
    return Internal("no placement holds a unit")
        .WithTensor(std::string(tensor_.entry.name));
  }

  const StoredTensor tensor_;
  const UnitView whole_;
  std::vector<StoredRun>* const runs_;
};

}  // namespace

Result<StoredTensor> FindStoredTensor(const Checkpoint& checkpoint,
                                      uint32_t entry) {
  StoredTensor out;
  out.entry = checkpoint.catalog().entries()[entry];
  TC_ASSIGN_OR_RETURN(out.placements,
                      checkpoint.Placements(entry, nullptr, &out.storages));
  return out;
}

Status StoredTensors::Fill(const std::vector<Stretch>& stretches,
                           MutableByteSpan scratch, FillBuffer* buffer) {
  std::vector<StoredRun> runs;
  for (const Stretch& stretch : stretches) {
    TC_ASSIGN_OR_RETURN(StoredTensor found,
                        find_(static_cast<uint32_t>(stretch.index)));
    inputs_->Expect(buffer->worker(), found.storages);
    TC_ASSIGN_OR_RETURN(TensorRuns tensor,
                        TensorRuns::Make(std::move(found), &runs));
    TC_RETURN_IF_ERROR(
        tensor.Add(stretch.from, stretch.from + stretch.bytes, stretch.at));
  }
  return inputs_->Read(&runs, scratch, buffer);
}

Status StoredFiles::Fill(const std::vector<Stretch>& stretches,
                         MutableByteSpan scratch, FillBuffer* buffer) {
  std::vector<StoredRun> runs;
  for (const Stretch& stretch : stretches) {
    Run run;
    run.src = stretch.from;
    run.dst = stretch.at;
    run.bytes = stretch.bytes;
    runs.push_back({static_cast<uint32_t>(stretch.index), run});
  }
  return inputs_->Read(&runs, scratch, buffer);
}

}  // namespace torch_ckpt
