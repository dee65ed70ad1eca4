#include "engine/write/converted_tensors.h"

#include <string>
#include <utility>

#include "values/cast.h"
#include "values/scaled.h"

namespace torch_ckpt {
namespace {

const DerivedTensor* DerivedOf(const Checkpoint& checkpoint, uint32_t entry) {
  return checkpoint.FindDerived(checkpoint.catalog().entries()[entry].name);
}

}  // namespace

Dtype UsualDtype(const Checkpoint& checkpoint, uint32_t entry) {
  return checkpoint.MakesNumbers(entry)
             ? kScaledAs
             : checkpoint.catalog().entries()[entry].dtype;
}

Status CheckConverts(const Checkpoint& checkpoint, uint32_t entry,
                     Dtype dtype) {
  const DerivedTensor* const derived = DerivedOf(checkpoint, entry);
  if (derived != nullptr) {
    const Checkpoint& of = *checkpoint.mapped_from();
    for (const MappedPart& part : derived->parts) {
      if (part.stored.empty()) continue;
      const auto e = static_cast<uint32_t>(of.catalog().Find(part.stored));
      TC_RETURN_IF_ERROR(CheckConverts(of, e, dtype));
    }
    return {};
  }
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
      made_(checkpoint_, inputs) {}

Origin ConvertedTensors::Find(uint32_t entry, Dtype dtype) {
  const CatalogEntry& e = checkpoint_->catalog().entries()[entry];
  if (checkpoint_->FindScaled(entry) != nullptr ||
      DerivedOf(*checkpoint_, entry) != nullptr) {
    return made_.Add(entry, dtype);
  }
  const Origin stored{&tensors_, entry};
  if (e.dtype == dtype) return stored;
  return casts_.Add(stored, e.dtype, dtype, std::string(e.name));
}

Status ConvertedTensors::Check() const {
  TC_RETURN_IF_ERROR(casts_.Check());
  return made_.Check();
}

}  // namespace torch_ckpt
