#include "engine/open/catalog_reader.h"

#include <algorithm>
#include <array>

#include "engine/open/read_dcp.h"
#include "engine/open/read_torch.h"
#include "engine/open/scan.h"
#include "format/names.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr std::array kReaders = {
    CatalogReader{HasSafetensors, ReadSafetensors},
    CatalogReader{HasDcpMetadata, ReadDcp},
    CatalogReader{HasTorchWeights, ReadTorchFiles},
};

// As people call files of torch.save.
bool IsTorchName(std::string_view name) {
  return name.ends_with(".pt") || name.ends_with(".pth") ||
         name.ends_with(".bin") || name.ends_with(".ckpt");
}

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
    if (!reader.recognise(names)) continue;
    TC_ASSIGN_OR_RETURN(ForeignCatalog read, reader.read(directory, names));
    if (!read.archives) {
      for (std::string& name : TorchWeights(names)) {
        read.beside.push_back(std::move(name));
      }
      std::sort(read.beside.begin(), read.beside.end());
    }
    return read;
  }
  std::string hint;
  if (std::find(names.begin(), names.end(), "__0.metadata") != names.end()) {
    hint = "; __0.metadata is of a save without collectives, which is not read";
  }
  if (std::find(names.begin(), names.end(), "sharded") != names.end()) {
    hint = "; its subdirectory 'sharded' may hold one";
  }
  const auto file = std::find_if(names.begin(), names.end(), IsTorchName);
  if (file != names.end()) {
    hint = "; of files such as " + *file + ", give the path of one";
  }
  return Incomplete("holds no checkpoint: neither " +
                    std::string(kManifestName) +
                    " nor any .safetensors file, .metadata or "
                    "pytorch_model.bin" +
                    hint)
      .WithFile(directory.path());
}

Result<ForeignCatalog> ReadForeignFile(const Directory& directory,
                                       const std::string& name) {
  for (const CatalogReader& reader : kReaders) {
    if (reader.recognise({&name, 1})) return reader.read(directory, {&name, 1});
  }
  return ReadTorchFiles(directory, {&name, 1});
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
