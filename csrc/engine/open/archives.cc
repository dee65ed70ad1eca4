#include "engine/open/archives.h"

#include <array>
#include <optional>
#include <string_view>

#include "base/budget.h"
#include "base/bytes.h"
#include "engine/open/torch_archive.h"
#include "format/torch/pickle_object.h"
#include "format/torch/state.h"

namespace torch_ckpt {

Result<bool> IsTorchArchive(const File& file, uint64_t offset) {
  constexpr std::string_view kMagic("PK\x03\x04");
  std::array<std::byte, kMagic.size()> first;
  TC_RETURN_IF_ERROR(file.ReadExact(first, offset));
  return AsText(first) == kMagic;
}

Result<std::vector<ZipContent>> ReadZipContents(const File& file,
                                                ByteRange range) {
  TC_ASSIGN_OR_RETURN(const TorchArchive archive,
                      TorchArchive::Open(file, range, kMaxObjectPickle));
  return archive.Contents();
}

Result<std::vector<Result<std::string>>> ReadArchivedObjects(
    const File& file, ByteRange range, std::span<const uint64_t> leaves) {
  TC_ASSIGN_OR_RETURN(const TorchArchive archive,
                      TorchArchive::Open(file, range, kMaxObjectPickle));
  std::optional<TorchState> state;
  std::vector<Result<std::string>> out;
  // Of all together, those that cannot be read included.
  Budget budget = archive.MakeBudget();
  for (const uint64_t leaf : leaves) {
    const PickleValue* value = &archive.root();
    if (leaf > 0) {
      if (!state) {
        Budget of_names = archive.MakeBudget();
        TC_ASSIGN_OR_RETURN(state, FlattenState(archive.root(), &of_names));
      }
      if (leaf > state->leaves.size()) {
        return Corrupt("the torch.save archive has no leaf " +
                       std::to_string(leaf));
      }
      value = state->leaves[leaf - 1].value;
    }
    out.push_back(ObjectOfPickle(
        *value,
        [&](const TorchTensor& tensor) {
          return archive.Elements(tensor, &budget);
        },
        &budget));
  }
  return out;
}

Result<StoredView::Resolved> ResolveArchive(const File& file,
                                            const Placement& placement,
                                            Dtype dtype) {
  TC_ASSIGN_OR_RETURN(
      const TorchArchive archive,
      TorchArchive::Open(file, ByteRange::Of(placement.offset, placement.bytes),
                         kMaxTensorPickle));
  if (!IsTorchTensor(archive.root())) {
    return Unsupported("the torch.save archive holds no plain tensor");
  }
  TC_ASSIGN_OR_RETURN(const TorchTensor tensor,
                      ReadTorchTensor(archive.root()));
  if (tensor.dtype != dtype || !(tensor.shape == placement.box.sizes)) {
    return Corrupt(std::string("the torch.save archive holds ") +
                   DtypeName(tensor.dtype) + " " + tensor.shape.ToString() +
                   " where the metadata says " + DtypeName(dtype) + " " +
                   placement.box.sizes.ToString());
  }
  TC_ASSIGN_OR_RETURN(StoredView::Resolved found, archive.Find(tensor));
  found.storage.file = found.placement.file = placement.file;
  found.placement.role = placement.role;
  found.placement.box = placement.box;
  return found;
}

}  // namespace torch_ckpt
