// Archives of torch.save: what their leaves are, and where; every place that is
// found lies inside of the file, and what is read as an object is JSON.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "engine/open/torch_archive.h"
#include "engine/open/torch_leaves.h"
#include "format/ours/catalog_codec.h"
#include "json/fields.h"

using namespace torch_ckpt;

namespace {

// More take long where each is of a few bytes that make many.
constexpr size_t kMostObjects = 10;
constexpr size_t kMostText = size_t{1} << 20;  // whose JSON is looked at

void CheckLeaves(const TorchLeaves& found, const File& file, uint64_t size) {
  std::vector<uint64_t> objects;
  for (size_t i = 0; i < found.leaves.size(); ++i) {
    const TorchLeaf& leaf = found.leaves[i];
    if (!leaf.is_tensor && objects.size() < kMostObjects) {
      objects.push_back(i + 1);
    }
    for (const Placement& placement : leaf.placements) {
      const auto bytes =
          internal::PlacementBytes(placement, leaf.dtype, leaf.shape);
      if (!bytes.ok() || placement.offset > size ||
          *bytes > size - placement.offset)
        abort();
    }
    if (leaf.storage.range.begin > size ||
        leaf.storage.range.size() > size - leaf.storage.range.begin)
      abort();
  }
  const auto read = ReadArchivedObjects(file, found.range, objects);
  if (!read.ok()) return;
  for (const auto& each : *read) {
    if (!each.ok() || each->size() > kMostText) continue;
    if (!Json::accept(*each)) abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const File file(memfd_create("input", 0), "input");
  if (!file.Truncate(0).ok() ||
      !file.WriteAll({reinterpret_cast<const std::byte*>(data), size}, 0).ok())
    abort();
  const ByteRange range{0, size};
  const auto archive = TorchArchive::Open(file, range, kMaxObjectPickle);
  if (!archive.ok()) return 0;
  const auto contents = archive->Contents();
  if (contents.ok()) {
    for (const ZipContent& each : *contents) {
      if (each.range.begin > size ||
          each.range.size() > size - each.range.begin)
        abort();
    }
  }
  Placement whole;
  whole.kind = PlacementKind::kArchive;
  whole.bytes = size;
  whole.box = Box::Whole({2, 3});
  (void)ResolveArchive(file, whole, Dtype::kF32).ok();
  const auto found = FindTorchLeaves(file, range, true);
  if (found.ok()) CheckLeaves(*found, file, size);
  return 0;
}
