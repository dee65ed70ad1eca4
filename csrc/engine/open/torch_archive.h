// An archive of torch.save inside a file: what its pickle says, and where the
// bytes of its storages are.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/budget.h"
#include "base/byte_range.h"
#include "engine/open/archives.h"
#include "engine/open/stored_view.h"
#include "format/torch/pickle.h"
#include "format/torch/tensor.h"
#include "format/torch/zip.h"
#include "os/file.h"

namespace torch_ckpt {

class TorchArchive {
 public:
  // Reads the directory and the pickle of the archive at `range`, and no
  // tensor. `file` must outlive the result. kCorrupt where there is none, or of
  // before torch 1.6, or what is read of it does not match its CRC-32;
  // kUnsupported for what pickle.h and zip.h do not read, and for another byte
  // order; kExhausted where the pickle or the directory has more than `most`
  // bytes.
  static Result<TorchArchive> Open(const File& file, ByteRange range,
                                   uint64_t most);

  const PickleValue& root() const { return pickle_.root(); }
  // Of the pickle. More than its bytes is kept where the archive has more:
  // objects hold the elements of tensors. Up to 256 MiB of it.
  Budget MakeBudget() const;
  // What all of its entries are, for who verifies them.
  Result<std::vector<ZipContent>> Contents() const;
  // Where in the file the tensor is: kStridedBox of all of it, and the storage
  // that it is in. No `file` is set. Reads the header of the storage. kCorrupt
  // where that has too few bytes, or other ones than the pickle says.
  Result<StoredView::Resolved> Find(const TorchTensor& tensor) const;
  // Its elements in row-major order, for those of objects: kUnsupported where
  // more than 128 MiB were to be read or made for them, kExhausted where
  // `budget` has not so much. Compares its storage with its CRC-32, the first
  // time. For one thread.
  Result<std::string> Elements(const TorchTensor& tensor, Budget* budget) const;

 private:
  TorchArchive(const File& file, ByteRange range)
      : file_(&file), range_(range) {}

  Result<std::string> Read(uint64_t offset, uint64_t bytes) const;
  Result<std::string> ReadEntry(const ZipEntry& entry) const;
  Status CheckStorage(const DigestedRange& storage) const;
  Status ReadDirectory(uint64_t most);
  Status ReadPickle(uint64_t most);

  const File* file_;
  ByteRange range_;
  // The first bytes of it, and the last: most that is asked for is there.
  std::string head_, tail_;
  ZipDirectory directory_;
  // What entries_ and pickle_ view, wherever this is moved.
  std::shared_ptr<const std::string> names_, text_;
  std::map<std::string_view, ZipEntry> entries_;
  std::string stem_;  // of all names, with its '/'
  Pickle pickle_;
  mutable std::set<uint64_t> checked_;  // where storages begin
};

// What pickle and directory of an archive may have: of one tensor, of an
// object.
inline constexpr uint64_t kMaxTensorPickle = uint64_t{1} << 20;
inline constexpr uint64_t kMaxObjectPickle = uint64_t{256} << 20;

}  // namespace torch_ckpt
