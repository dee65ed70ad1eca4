#include "engine/open/read_dcp.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "engine/open/not_weights.h"
#include "format/names.h"
#include "format/torch/dcp_metadata.h"

namespace torch_ckpt {

bool HasDcpMetadata(std::span<const std::string> names) {
  return std::binary_search(names.begin(), names.end(), kDcpMetadataName);
}

bool IsDcpFile(const std::string& name) { return name.ends_with(".distcp"); }

Result<std::vector<std::string>> FindStockMetadata(const Directory& directory) {
  std::vector<std::string> found;
  for (const std::string_view each : kStockMetadataNames) {
    std::string name(each);
    const Result<File> file = directory.OpenFile(name, {});
    if (file.status().sys_errno() == ENOENT) continue;
    if (file.status().kind() == ErrorKind::kCorrupt) {
      return Conflict(file.status().message() +
                      " where stock DCP has its metadata: remove it, or use "
                      "another directory")
          .WithFile(directory.Join(name));
    }
    if (!file.ok()) return file.status();
    std::array<std::byte, kPatchMark.size()> begin;
    TC_ASSIGN_OR_RETURN(const uint64_t count, file->Read(begin, 0));
    if (count == begin.size() && AsText(begin) == kPatchMark) continue;
    found.push_back(std::move(name));
  }
  return found;
}

Result<DcpDirectory> ReadDcpDirectory(const Directory& directory,
                                      std::string_view apart) {
  const std::string metadata(kDcpMetadataName);
  const std::string path = directory.Join(metadata);
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> seen,
                      directory.StatName(metadata));
  TC_ASSIGN_OR_RETURN(const std::string pickle,
                      directory.ReadFile(metadata, kMaxDcpMetadataBytes));
  Budget budget("the pickle", pickle.size());
  Result<DcpMetadata> parsed =
      ParseDcpMetadata(AsBytes(pickle), &budget, apart);
  if (!parsed.ok()) {
    const Result<File> file = directory.OpenFile(metadata, {});
    if (file.ok()) TC_RETURN_IF_ERROR(CheckNoStandIn(*file));
    return parsed.status().WithFile(path);
  }
  DcpDirectory out;
  for (const DcpFile& named : parsed->files) {
    TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                        directory.StatName(named.name));
    if (!info) {
      return Incomplete("is missing, and .metadata names it")
          .WithFile(directory.Join(named.name));
    }
    if (info->bytes < named.bytes) {
      return Incomplete("has " + std::to_string(info->bytes) +
                        " bytes, and .metadata says that it has " +
                        std::to_string(named.bytes) + " at least")
          .WithFile(directory.Join(named.name));
    }
    out.found.AddFile(named.name, *info);
  }
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> still,
                      directory.StatName(metadata));
  if (!seen || !still || !still->SameFile(*seen) ||
      still->modified_ns != seen->modified_ns) {
    return Conflict("was written while it was read").WithFile(path);
  }
  out.found.identity = IdentityOf(out.found.files, out.found.infos) + " " +
                       std::to_string(seen->modified_ns);
  out.catalog = std::move(parsed->catalog);
  out.found.unread = std::move(parsed->unread);
  out.found.archives = std::move(parsed->more);
  out.apart = parsed->apart;
  return out;
}

Result<ForeignCatalog> ReadDcp(const Directory& directory,
                               std::span<const std::string>, bool) {
  TC_ASSIGN_OR_RETURN(DcpDirectory read, ReadDcpDirectory(directory, {}));
  ForeignCatalog out = std::move(read.found);
  out.source = "dcp";
  Result<Catalog> catalog = Catalog::From(std::move(read.catalog), out.files);
  if (!catalog.ok()) {
    return catalog.status().WithFile(
        directory.Join(std::string(kDcpMetadataName)));
  }
  out.catalog = std::move(catalog).value();
  return out;
}

}  // namespace torch_ckpt
