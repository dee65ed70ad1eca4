// Safetensors files inside of other files, behind other things: how stock DCP
// saves with serialization_format=SAFETENSORS. Its .metadata says where the
// blob begins, and not where in it a tensor is.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "format/ours/catalog.h"
#include "format/safetensors/short_header.h"
#include "os/file.h"

namespace torch_ckpt {

// Remembers headers: each says where many tensors are. Thread-safe.
class SafetensorsBlobs {
 public:
  // `placement`, a kArchive of the tensor `name` at the beginning of a blob
  // that ends with its file, as the kBox that it is. kCorrupt where the blob
  // holds something else.
  Result<Placement> Resolve(const File& file, const Placement& placement,
                            std::string_view name, Dtype dtype);

 private:
  struct Blob {
    FileHeader file;
    std::map<std::string_view, size_t> by_name;  // of file.header.tensors
  };
  using BlobPtr = std::shared_ptr<const Blob>;
  static Result<BlobPtr> ReadBlob(const File& file, uint64_t offset);
  Result<BlobPtr> BlobOf(const File& file, const Placement& placement);

  std::mutex mutex_;
  std::map<std::pair<uint32_t, uint64_t>, BlobPtr> blobs_;  // by file, offset
};

}  // namespace torch_ckpt
