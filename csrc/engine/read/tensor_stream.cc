#include "engine/read/tensor_stream.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "engine/read/read_job.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMostBuffer = uint64_t{64} << 20;  // more gains nothing
constexpr size_t kMostBoxes = size_t{1} << 14;  // a plan of each takes memory
constexpr int64_t kStretchElements = int64_t{1} << 16;
constexpr uint64_t kAlignment = 64;

uint64_t BytesOf(Dtype dtype, const Box& box) {
  // Of a box in a tensor whose bytes were counted.
  return static_cast<uint64_t>(box.Volume()) *
         static_cast<uint64_t>(DtypeBits(dtype)) / 8;
}

}  // namespace

Result<TensorStream> TensorStream::Open(
    std::vector<std::shared_ptr<const Checkpoint>> checkpoints,
    const std::vector<std::string>& names, const StreamOptions& options,
    Job* job) {
  TensorStream out(std::move(checkpoints), options, job);
  for (const auto& checkpoint : out.checkpoints_) {
    out.inputs_.push_back(std::make_unique<StoredInputs>(
        checkpoint->LendFiles(options.direct_io), options.verify,
        std::max(1, options.workers), Wholes::kAtOnce));
  }
  for (const std::string& name : names) {
    TC_RETURN_IF_ERROR(out.AddTensor(name));
  }
  TC_RETURN_IF_ERROR(out.LeaseMemory());
  return out;
}

Status TensorStream::AddTensor(const std::string& name) {
  Tensor tensor;
  tensor.name = name;
  for (const auto& checkpoint : checkpoints_) {
    const Catalog& catalog = checkpoint->catalog();
    const int64_t found = catalog.Find(name);
    if (found < 0 || catalog.entries()[static_cast<size_t>(found)].kind ==
                         EntryKind::kObject) {
      return Incomplete("is no tensor of the checkpoint")
          .WithTensor(name)
          .WithFile(checkpoint->path());
    }
    const CatalogEntry& entry = catalog.entries()[static_cast<size_t>(found)];
    if (tensor.dtypes.empty()) tensor.shape = entry.shape;
    if (!(tensor.shape == entry.shape)) {
      return InvalidArgument("has the shapes " + tensor.shape.ToString() +
                             " and " + entry.shape.ToString())
          .WithTensor(name);
    }
    tensor.dtypes.push_back(entry.dtype);
  }
  tensors_.push_back(std::move(tensor));
  return {};
}

Status TensorStream::LeaseMemory() {
  const uint64_t workers =
      static_cast<uint64_t>(std::max(1, options_.workers)) *
      RoundUp(kFetchBytes, kArenaPage);
  if (options_.memory < workers + kArenaPage) {
    return Exhausted("the memory budget is less than the " +
                     std::to_string(workers + kArenaPage) + " bytes that " +
                     std::to_string(options_.workers) + " workers take");
  }
  const uint64_t most =
      std::min(kMostBuffer, RoundDown(options_.memory - workers, kArenaPage));
  uint64_t needed = 0;
  for (size_t i = 0; i < tensors_.size() && needed < most; ++i) {
    needed += Taken(i, Box::Whole(tensors_[i].shape));
  }
  if (needed == 0) return {};
  // Each box of a tensor is aligned, which takes a bit more than the whole.
  TC_ASSIGN_OR_RETURN(buffer_,
                      LeaseBuffer(std::min(needed + kArenaPage, most), job_));
  return {};
}

uint64_t TensorStream::Taken(size_t tensor, const Box& box) const {
  uint64_t taken = 0;
  for (const Dtype dtype : tensors_[tensor].dtypes) {
    taken += RoundUp(BytesOf(dtype, box), kAlignment);
  }
  return taken;
}

// Appends boxes of `box` to boxes_, the last one first, each at most a quarter
// of the buffer, or one that cannot be cut.
void TensorStream::Cut(size_t tensor, const Box& box) {
  const std::vector<Dtype>& dtypes = tensors_[tensor].dtypes;
  const uint64_t taken = Taken(tensor, box), most = buffer_.size() / 4;
  int64_t unit = 1;
  for (const Dtype dtype : dtypes) {
    unit = std::max(unit, DtypeUnit(dtype).elements);
  }
  const Dims& shape = tensors_[tensor].shape;
  const int last = box.rank() - 1;
  // Of units that are cut by rows there is only the whole.
  const bool whole = unit > 1 && shape[last] % unit != 0;
  int dim = 0;
  while (dim <= last && box.sizes[dim] <= (dim == last ? unit : 1)) ++dim;
  if (taken <= most || whole || dim > last) {
    boxes_.push_back(box);
    return;
  }
  const int64_t step = dim == last ? unit : 1;
  const int64_t steps = box.sizes[dim] / step;
  const uint64_t of_step = (taken - 1) / static_cast<uint64_t>(steps) + 1;
  const auto at_once = static_cast<int64_t>(most / of_step);
  const int64_t count = std::max<int64_t>(1, at_once) * step;
  for (int64_t end = box.sizes[dim], at = (end - 1) / count * count; end > 0;
       end = at, at -= count) {
    Box part = box;
    part.offsets[dim] += at;
    part.sizes[dim] = end - at;
    Cut(tensor, part);
  }
}

Result<std::vector<TensorStream::BufferedBox>> TensorStream::TakeBoxes() {
  std::vector<BufferedBox> boxes;
  uint64_t at = 0;
  while (boxes.size() < kMostBoxes) {
    if (boxes_.empty()) {
      if (next_ == tensors_.size()) break;
      Cut(next_, Box::Whole(tensors_[next_].shape));
      ++next_;
    }
    const size_t tensor = next_ - 1;
    const Box& box = boxes_.back();
    const uint64_t taken = Taken(tensor, box);
    if (taken > buffer_.size()) {
      return Exhausted("needs " + std::to_string(taken) +
                       " bytes at once, more than the memory budget leaves")
          .WithTensor(tensors_[tensor].name);
    }
    if (at + taken > buffer_.size()) break;
    BufferedBox buffered{tensor, box, {}};
    for (const Dtype dtype : tensors_[tensor].dtypes) {
      buffered.bytes.push_back(buffer_.data() + at);
      at += RoundUp(BytesOf(dtype, box), kAlignment);
    }
    if (taken > 0) boxes.push_back(std::move(buffered));
    boxes_.pop_back();
  }
  return boxes;
}

Status TensorStream::Read(const std::vector<BufferedBox>& boxes, size_t c) {
  ReadPlan plan;
  plan.workers = options_.workers;
  plan.verify = options_.verify;
  plan.direct_io = options_.direct_io;
  std::vector<TargetTensor> targets;
  for (const BufferedBox& buffered : boxes) {
    const Tensor& tensor = tensors_[buffered.tensor];
    ReadItem& item = plan.items.emplace_back();
    item.name = tensor.name;
    item.box = buffered.box;
    item.target = targets.size();
    const uint64_t bytes = BytesOf(tensor.dtypes[c], buffered.box);
    targets.push_back({buffered.bytes[c], {static_cast<int64_t>(bytes)}, {1}});
  }
  return RunReadJob(checkpoints_[c], plan, targets, job_, inputs_[c].get())
      .status();
}

void TensorStream::Divide(const std::vector<BufferedBox>& boxes) {
  stretches_.clear();
  for (const BufferedBox& buffered : boxes) {
    const std::vector<Dtype>& dtypes = tensors_[buffered.tensor].dtypes;
    const int64_t elements = buffered.box.Volume();
    for (int64_t at = 0; at < elements; at += kStretchElements) {
      Stretch& next = stretches_.emplace_back();
      next.tensor = buffered.tensor;
      next.elements =
          static_cast<size_t>(std::min(kStretchElements, elements - at));
      for (size_t c = 0; c < dtypes.size(); ++c) {
        next.bytes.push_back(buffered.bytes[c] + at * DtypeBits(dtypes[c]) / 8);
      }
    }
  }
}

Result<std::span<const TensorStream::Stretch>> TensorStream::Next() {
  TC_ASSIGN_OR_RETURN(const std::vector<BufferedBox> boxes, TakeBoxes());
  // Storages at the end, which boxes are parts of. Who looks at a view of a
  // large one is not to read all of that.
  for (size_t c = 0; boxes.empty() && c < checkpoints_.size(); ++c) {
    TC_RETURN_IF_ERROR(inputs_[c]->Check(job_));
  }
  for (size_t c = 0; !boxes.empty() && c < checkpoints_.size(); ++c) {
    TC_RETURN_IF_ERROR(Read(boxes, c));
  }
  Divide(boxes);
  return std::span<const Stretch>(stretches_);
}

}  // namespace torch_ckpt
