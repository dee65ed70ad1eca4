// `.metadata`: the pickle by which stock DCP says what its .distcp files hold.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/budget.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/ours/catalog.h"
#include "format/ours/catalog_builder.h"

namespace torch_ckpt {

inline constexpr std::string_view kDcpMetadataName = ".metadata";
inline constexpr uint64_t kMaxDcpMetadataBytes = uint64_t{2} << 30;

struct DcpFile {
  std::string name;
  uint64_t bytes = 0;  // at least: what it says to be in it
};

struct DcpMetadata {
  // Placements are of kArchive: DCP saves each box in a torch.save archive of
  // its own. Objects are such archives too.
  CatalogBuilder catalog;
  std::vector<DcpFile> files;
  // Tensors that are not read: objects of the catalog where their dtypes are
  // none of ours, else tensors.
  std::map<std::string, UnreadTensor, std::less<>> unread;
  // The later chunks of those that are objects.
  std::vector<TorchArchivePlace> more;
  // The object that was asked for, which is no entry of the catalog then.
  std::optional<TorchArchivePlace> apart;
};

// kCorrupt and kIncomplete name the tensor; kUnsupported for what
// pickles must not say (format/torch/pickle.h) and for transformed items. That
// the boxes of a tensor tile it is not seen here. The object named `apart`,
// where that is not empty, goes to DcpMetadata::apart. `budget`: of the pickle.
Result<DcpMetadata> ParseDcpMetadata(ByteSpan pickle, Budget* budget,
                                     std::string_view apart = {});

}  // namespace torch_ckpt
