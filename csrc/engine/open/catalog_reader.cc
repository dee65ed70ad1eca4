#include "engine/open/catalog_reader.h"

#include <algorithm>
#include <array>

#include "engine/open/read_dcp.h"
#include "engine/open/read_index.h"
#include "engine/open/read_megatron.h"
#include "engine/open/read_torch.h"
#include "engine/open/scan.h"
#include "format/names.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

template <bool (*kHas)(std::span<const std::string>)>
Result<bool> ByNames(const Directory&, std::span<const std::string> names) {
  return kHas(names);
}

constexpr std::array kReaders = {
    CatalogReader{kWholeFormat, IsSafetensors, ReadSafetensors},
    CatalogReader{"megatron", IsMegatron, ReadMegatron},
    CatalogReader{"dcp", ByNames<HasDcpMetadata>, ReadDcp},
    CatalogReader{kTorchFormat, IsTorchWeights, ReadTorchFiles},
};

// As people call files of torch.save.
bool IsTorchName(std::string_view name) {
  return name.ends_with(".pt") || name.ends_with(".pth") ||
         name.ends_with(".bin") || name.ends_with(".ckpt");
}

Status NothingHere(const Directory& directory,
                   std::span<const std::string> names) {
  std::string hint;
  if (std::binary_search(names.begin(), names.end(), "__0.metadata")) {
    hint = "; __0.metadata is of a save without collectives, which is not read";
  } else if (std::binary_search(names.begin(), names.end(), "sharded")) {
    hint = "; its subdirectory 'sharded' may hold one";
  } else if (const auto file =
                 std::find_if(names.begin(), names.end(), IsTorchName);
             file != names.end()) {
    hint = "; of files such as " + *file + ", give the path of one";
  }
  return Incomplete("holds no checkpoint: neither " +
                    std::string(kManifestName) +
                    " nor any .safetensors file, .metadata or "
                    "pytorch_model.bin" +
                    hint)
      .WithFile(directory.path());
}

Result<const CatalogReader*> FindReader(const Directory& directory,
                                        std::span<const std::string> names,
                                        bool is_file) {
  if (HasSafetensors(names) && HasDcpMetadata(names) &&
      std::any_of(names.begin(), names.end(), IsDcpFile)) {
    return Conflict(
               "holds two checkpoints: .safetensors files, and .metadata with "
               ".distcp files; move those that you do not mean elsewhere, or "
               "say which format is meant")
        .WithFile(directory.path());
  }
  for (const CatalogReader& reader : kReaders) {
    TC_ASSIGN_OR_RETURN(const bool is, reader.recognise(directory, names));
    if (is) return &reader;
  }
  if (is_file) return &kReaders.back();
  TC_RETURN_IF_ERROR(CheckIndexAlone(directory, names));
  return NothingHere(directory, names);
}

}  // namespace

void ForeignCatalog::AddFile(std::string name, const FileInfo& info) {
  ManifestFile& file = files.emplace_back();
  file.name = std::move(name);
  file.bytes = info.bytes;
  file.container = Container::kRaw;
  infos.push_back(info);
}

Result<ForeignCatalog> ReadForeign(const Directory& directory,
                                   const std::string* file,
                                   std::string_view format) {
  std::vector<std::string> names;
  if (file) {
    names.push_back(*file);
  } else {
    TC_ASSIGN_OR_RETURN(names, directory.List());
  }
  const CatalogReader* reader = nullptr;
  for (const CatalogReader& each : kReaders) {
    if (each.format == format) reader = &each;
  }
  if (format.empty()) {
    TC_ASSIGN_OR_RETURN(reader, FindReader(directory, names, file != nullptr));
  } else if (file && format == kOurFormat) {
    return Incomplete("is a file; the format torch_ckpt is of directories")
        .WithFile(directory.Join(*file));
  } else if (!reader) {
    std::string known(kOurFormat);
    for (const CatalogReader& each : kReaders) {
      known += ", " + std::string(each.format);
    }
    return InvalidArgument("format is one of " + known + "; not '" +
                           std::string(format) + "'");
  } else if (!file || reader != &kReaders.back()) {
    TC_ASSIGN_OR_RETURN(const bool is, reader->recognise(directory, names));
    if (!is) {
      if (!file && format == kWholeFormat) {
        TC_RETURN_IF_ERROR(CheckIndexAlone(directory, names));
      }
      return Incomplete("holds no checkpoint of the format " +
                        std::string(format))
          .WithFile(file ? directory.Join(*file) : directory.path());
    }
  }
  TC_ASSIGN_OR_RETURN(ForeignCatalog read,
                      reader->read(directory, names, file != nullptr));
  read.format = reader->format;
  if (reader != &kReaders.back()) {
    for (std::string& name : TorchWeights(names)) {
      read.beside.push_back(std::move(name));
    }
    std::sort(read.beside.begin(), read.beside.end());
  }
  if (!read.beside.empty()) {
    read.notes.push_back("holds weights beside its own that are not read: " +
                         Listed(read.beside));
  }
  return read;
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
