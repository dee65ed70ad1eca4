// `.metadata`: the pickle by which stock DCP says what its .distcp files hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/catalog_builder.h"

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
};

// kCorrupt and kIncomplete name the tensor; kUnsupported for what
// pickles must not say (format/pickle.h) and for transformed items. That the
// boxes of a tensor tile it is not seen here.
Result<DcpMetadata> ParseDcpMetadata(ByteSpan pickle);

}  // namespace torch_ckpt
