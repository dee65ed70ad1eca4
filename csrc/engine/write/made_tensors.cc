#include "engine/write/made_tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "base/checked.h"
#include "engine/read/item_reads.h"
#include "plan/ranges.h"
#include "plan/runs.h"

namespace torch_ckpt {
namespace {

// What stretches want, as items with targets in the buffer.
class StretchItems {
 public:
  explicit StretchItems(FillBuffer* buffer) : buffer_(buffer) {}

  // REQUIRES: `dtype` has whole bytes.
  void Add(const CatalogEntry& entry, Dtype dtype, const Stretch& stretch) {
    const auto unit = static_cast<uint64_t>(DtypeBits(dtype)) / 8;
    uint64_t from = stretch.from, at = stretch.at;
    const uint64_t to = from + stretch.bytes;
    // An element that a stretch cuts is made whole, beside the buffer.
    while (from < to) {
      const uint64_t first = from / unit;
      const bool whole = from % unit == 0 && to - from >= unit;
      const uint64_t past = whole ? to / unit : first + 1;
      const uint64_t end = std::min(to, past * unit);
      std::byte* const out = buffer_->Out(at, end - from).data();
      std::byte* const data =
          whole ? out : AddCut(from - first * unit, out, end - from);
      AddElements(entry, dtype, first, past, data);
      at += end - from;
      from = end;
    }
    buffer_->Filled(stretch.bytes);
  }

  const std::vector<ReadItem>& items() const { return items_; }
  const std::vector<TargetTensor>& targets() const { return targets_; }

  // When all is read.
  void CopyCut() const {
    for (const Cut& cut : cut_) {
      std::memcpy(cut.out, cut.whole.data() + cut.from, cut.bytes);
    }
  }

 private:
  struct Cut {
    std::array<std::byte, 16> whole;
    std::byte* out;
    uint64_t from, bytes;
  };

  std::byte* AddCut(uint64_t from, std::byte* out, uint64_t bytes) {
    cut_.push_back({{}, out, from, bytes});
    return cut_.back().whole.data();
  }

  // Elements [first, past), row by row, at `data`.
  void AddElements(const CatalogEntry& entry, Dtype dtype, uint64_t first,
                   uint64_t past, std::byte* data) {
    const int64_t unit = DtypeBits(dtype) / 8;
    for (Box& box : BoxesOfRange(entry.shape, static_cast<int64_t>(first),
                                 static_cast<int64_t>(past))) {
      const int64_t bytes = box.Volume() * unit;
      TargetTensor target;
      target.data = data;
      target.sizes = box.sizes;
      target.strides = DenseStrides(box.sizes, unit);
      target.element_bytes = unit;
      target.cast_to = dtype;
      ReadItem item;
      item.name = std::string(entry.name);
      item.box = std::move(box);
      item.target = targets_.size();
      items_.push_back(std::move(item));
      targets_.push_back(target);
      data += bytes;
    }
  }

  FillBuffer* const buffer_;
  std::vector<ReadItem> items_;
  std::vector<TargetTensor> targets_;
  std::deque<Cut> cut_;
};

}  // namespace

Origin MadeTensors::Add(uint32_t entry, Dtype dtype) {
  things_.push_back({entry, dtype});
  return {this, things_.size() - 1};
}

Status MadeTensors::Check() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

Status MadeTensors::Fill(const std::vector<Stretch>& stretches,
                         MutableByteSpan scratch, FillBuffer* buffer) {
  StretchItems wanted(buffer);
  for (const Stretch& stretch : stretches) {
    const Thing& thing = things_[stretch.index];
    wanted.Add(checkpoint_->catalog().entries()[thing.entry], thing.dtype,
               stretch);
  }
  // Parts of a row are beside what other stretches want.
  const bool neighbours = checkpoint_->mapped_from() != nullptr;
  TC_ASSIGN_OR_RETURN(ItemReads reads,
                      ItemReads::Plan(checkpoint_, wanted.items(),
                                      wanted.targets(), neighbours));
  Status lost;
  const auto deliver = [&](const PlannedReads& planned) -> Status {
    for (size_t i = 0; i < planned.size(); ++i) {
      const ReadPiece piece = planned.Piece(i);
      const WantedRuns runs{piece.file,   piece.runs, planned.storages(),
                            piece.shared, neighbours, nullptr};
      TC_RETURN_IF_ERROR(
          inputs_->Read(buffer->worker(), runs, scratch).status());
    }
    return {};
  };
  TC_RETURN_IF_ERROR(reads.Run(deliver, &lost));
  wanted.CopyCut();
  if (lost.ok()) return {};
  const std::lock_guard lock(mutex_);
  if (lost_.ok()) lost_ = std::move(lost);
  return {};
}

}  // namespace torch_ckpt
