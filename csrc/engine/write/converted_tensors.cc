#include "engine/write/converted_tensors.h"

#include <optional>
#include <string>
#include <utility>

#include "values/cast.h"
#include "values/scaled.h"

namespace torch_ckpt {

Dtype UsualDtype(const Checkpoint& checkpoint, uint32_t entry) {
  return checkpoint.FindScaled(entry) != nullptr
             ? kScaledAs
             : checkpoint.catalog().entries()[entry].dtype;
}

Status CheckConverts(const Checkpoint& checkpoint, uint32_t entry,
                     Dtype dtype) {
  const CatalogEntry& e = checkpoint.catalog().entries()[entry];
  const ScaledTensor* const scaled = checkpoint.FindScaled(entry);
  const bool converts = scaled != nullptr
                            ? CanScale(e.dtype, scaled->scale_dtype, dtype)
                            : dtype == e.dtype || CanCast(e.dtype, dtype);
  if (converts) return {};
  return InvalidArgument(
             std::string("is ") + DtypeName(e.dtype) +
             (scaled != nullptr ? " times '" + scaled->scales + "'" : "") +
             ", which is not cast to " + DtypeName(dtype))
      .WithTensor(std::string(e.name));
}

ConvertedTensors::ConvertedTensors(std::shared_ptr<const Checkpoint> checkpoint,
                                   StoredInputs* inputs)
    : checkpoint_(std::move(checkpoint)),
      tensors_(inputs, [this](uint32_t e) { return checkpoint_->View(e); }),
      scales_(inputs, [this](uint32_t e) {
        return checkpoint_->as_stored()->View(e);
      }) {}

Origin ConvertedTensors::Find(uint32_t entry, Dtype dtype) {
  const CatalogEntry& e = checkpoint_->catalog().entries()[entry];
  const ScaledTensor* const scaled = checkpoint_->FindScaled(entry);
  const Origin stored{&tensors_, entry};
  if (scaled == nullptr && e.dtype == dtype) return stored;
  std::optional<ScaleSource> source;
  if (scaled != nullptr) {
    const int64_t scales =
        checkpoint_->as_stored()->catalog().Find(scaled->scales);
    source = {{&scales_, static_cast<uint64_t>(scales)}, *scaled, e.shape};
  }
  return casts_.Add(stored, e.dtype, dtype, std::string(e.name),
                    std::move(source));
}

}  // namespace torch_ckpt
