#include "engine/open/catalog_reader.h"

#include <algorithm>
#include <array>

#include "engine/open/read_dcp.h"
#include "engine/open/scan.h"
#include "format/names.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr std::array kReaders = {
    CatalogReader{HasSafetensors, ScanDirectory},
    CatalogReader{HasDcpMetadata, ReadDcp},
};

}  // namespace

Result<ForeignCatalog> ReadForeign(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  if (HasSafetensors(names) && HasDcpMetadata(names) &&
      std::any_of(names.begin(), names.end(), IsDcpFile)) {
    return Conflict(
               "holds two checkpoints: .safetensors files, and .metadata with "
               ".distcp files; move those that you do not mean elsewhere")
        .WithFile(directory.path());
  }
  for (const CatalogReader& reader : kReaders) {
    if (reader.recognise(names)) return reader.read(directory);
  }
  std::string hint;
  if (std::find(names.begin(), names.end(), "__0.metadata") != names.end()) {
    hint = "; __0.metadata is of a save without collectives, which is not read";
  }
  if (std::find(names.begin(), names.end(), "sharded") != names.end()) {
    hint = "; its subdirectory 'sharded' may hold one";
  }
  return Incomplete("holds no checkpoint: neither " +
                    std::string(kManifestName) +
                    " nor any .safetensors file nor .metadata" + hint)
      .WithFile(directory.path());
}

std::string IdentityOf(std::span<const ManifestFile> files,
                       std::span<const FileInfo> infos) {
  uint32_t crc = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string said = files[i].name + "/" +
                             std::to_string(infos[i].bytes) + "/" +
                             std::to_string(infos[i].modified_ns) + "/";
    crc = Crc32c(crc, said.data(), said.size());
  }
  return "files " + std::to_string(crc);
}

}  // namespace torch_ckpt
