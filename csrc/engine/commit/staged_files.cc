#include "engine/commit/staged_files.h"

#include <algorithm>
#include <map>
#include <set>

#include "engine/commit/each_file.h"
#include "format/names.h"
#include "os/path.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMaxShownName = 100;

// The headers of the data files, once every file has a name of its own.
Result<std::vector<NamedHeader>> ReadHeaders(const Directory& staging,
                                             const CommitRequest& request) {
  std::vector<uint32_t> data;  // positions in the request
  std::set<std::string_view> names;
  for (uint32_t f = 0; f < request.files.size(); ++f) {
    const StagedFile& file = request.files[f];
    TC_RETURN_IF_ERROR(CheckFilePath(file.name));
    TC_RETURN_IF_ERROR(CheckFileName(file.staged));
    if (!names.insert(file.name).second) {
      return Conflict("two ranks wrote a file of this name")
          .WithFile(file.name);
    }
    if (file.role == FileRole::kData) data.push_back(f);
  }
  std::vector<NamedHeader> headers(data.size());
  const auto read = [&](size_t i) -> Status {
    NamedHeader& out = headers[i];
    out.position = data[i];
    const StagedFile& file = request.files[out.position];
    TC_ASSIGN_OR_RETURN(out.file, ReadStagedHeader(staging, file.staged));
    out.name = file.name;
    if (out.file.sharding.file_id != file.id ||
        out.file.header.file_bytes != file.bytes) {
      return Corrupt("is not the file that its rank has written")
          .WithFile(staging.Join(file.staged));
    }
    return {};
  };
  TC_RETURN_IF_ERROR(ForEachFile(data.size(), read, kSeveral));
  return headers;
}

Status AddAliases(const CommitRequest& request, CatalogBuilder* catalog) {
  for (const auto& [name, alias_of] : request.aliases) {
    if (catalog->Find(alias_of) < 0) {
      return Incomplete("was to be an alias of '" + alias_of +
                        "', which no rank has written")
          .WithTensor(name);
    }
    TC_RETURN_IF_ERROR(catalog->AddAlias(name, alias_of).status());
  }
  return {};
}

// Of files that are no data they are looked for, too.
Status AddObjects(const Directory& staging, const CommitRequest& request,
                  CatalogBuilder* catalog) {
  std::vector<const StagedFile*> others;
  std::map<std::string_view, uint32_t> object_files;
  for (uint32_t f = 0; f < request.files.size(); ++f) {
    const StagedFile& file = request.files[f];
    if (file.role == FileRole::kData) continue;
    others.push_back(&file);
    if (file.role == FileRole::kObjects) {
      object_files[file.name] = f;
    }
  }
  TC_RETURN_IF_ERROR(ForEachFile(others.size(), [&](size_t i) -> Status {
    const StagedFile& file = *others[i];
    TC_ASSIGN_OR_RETURN(const auto info, staging.StatName(file.staged));
    if (info && info->bytes == file.bytes) return {};
    return Incomplete("is not in staging as its rank has written it")
        .WithFile(file.name);
  }));
  for (const ObjectEntry& object : request.objects) {
    const auto file = object_files.find(object.file);
    if (file == object_files.end()) {
      return InvalidArgument("names the objects file " + object.file +
                             ", which nobody wrote")
          .WithTensor(object.name);
    }
    if (object.name.size() > kMaxNameBytes) {
      return InvalidArgument("its name is longer than " +
                             std::to_string(kMaxNameBytes) + " bytes")
          .WithTensor(object.name.substr(0, kMaxShownName) + "...");
    }
    TC_RETURN_IF_ERROR(catalog->AddObject(object.name, file->second).status());
  }
  return {};
}

// The paths of all that was planned, which must be there by now.
Status SetPaths(const CommitRequest& request, CatalogBuilder* catalog) {
  for (const auto& [name, path] : request.planned) {
    const int64_t id = catalog->Find(name);
    if (id < 0) {
      return Incomplete("was planned, and no rank has written it")
          .WithTensor(name);
    }
    if (!path.empty()) catalog->SetPath(static_cast<uint32_t>(id), path);
  }
  return {};
}

}  // namespace

Result<CatalogBuilder> CatalogOfStaged(const Directory& staging,
                                       const CommitRequest& request,
                                       BoxProof proof) {
  TC_ASSIGN_OR_RETURN(const std::vector<NamedHeader> headers,
                      ReadHeaders(staging, request));
  TC_ASSIGN_OR_RETURN(CatalogBuilder catalog, BuildCatalog(headers, proof));
  // What headers do not know.
  TC_RETURN_IF_ERROR(AddAliases(request, &catalog));
  TC_RETURN_IF_ERROR(AddObjects(staging, request, &catalog));
  TC_RETURN_IF_ERROR(SetPaths(request, &catalog));
  return catalog;
}

Result<StagedFile> AddStagedCatalog(const Directory& staging,
                                    std::string_view name,
                                    const CatalogBuilder& catalog,
                                    const std::vector<StagedFile>& files) {
  TC_ASSIGN_OR_RETURN(const std::string text, catalog.Encode());
  std::vector<ManifestFile> listed;
  for (const StagedFile& file : files) listed.push_back(file);
  const auto read = [&]() -> Status {
    TC_ASSIGN_OR_RETURN(const Catalog parsed, Catalog::Parse(text, listed));
    for (uint32_t e = 0; e < parsed.entries().size(); ++e) {
      TC_RETURN_IF_ERROR(parsed.Placements(e, listed).status());
    }
    return {};
  };
  const Status readable = read();
  if (!readable.ok()) {
    return InvalidArgument("what is to be committed makes no valid catalog: " +
                           readable.message())
        .WithTensor(readable.tensor());
  }
  return AddStagedFile(staging, name, FileRole::kCatalog, text);
}

Result<StagedFile> AddStagedFile(const Directory& staging,
                                 std::string_view name, FileRole role,
                                 const std::string& text) {
  StagedFile file;
  file.name = std::string(name);
  file.id = NewId();
  file.role = role;
  file.container = ContainerOf(role);
  file.bytes = text.size();
  for (uint64_t at = 0; at < text.size(); at += kSegmentBytes) {
    file.crc32c.push_back(
        Crc32c(0, text.data() + at, std::min(kSegmentBytes, text.size() - at)));
  }
  file.staged = StagedName(name, file.id);
  TC_RETURN_IF_ERROR(staging.WriteFile(file.staged, text));
  return file;
}

namespace {

Result<StagedFile> AddExtra(const Directory& staging, const std::string& path,
                            const std::string& subdirectory) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(path));
  StagedFile file;
  const std::string name = BaseName(absolute);
  file.name = PathIn(subdirectory, name);
  TC_RETURN_IF_ERROR(CheckFileName(name).WithFile(absolute));
  if (name.ends_with(kDataSuffix) || name.ends_with(kIndexSuffix) ||
      name == kManifestName || name == kCatalogName || name == kJournalName ||
      IsPartManifestName(name)) {
    return InvalidArgument("cannot stand beside a checkpoint under this name")
        .WithFile(absolute);
  }
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(absolute)));
  TC_ASSIGN_OR_RETURN(const File in, parent.OpenFile(name, {}));
  TC_ASSIGN_OR_RETURN(const FileInfo info, in.Stat());
  if (!info.is_regular) {
    return InvalidArgument("is no regular file").WithFile(absolute);
  }
  file.id = NewId();
  file.role = FileRole::kExtra;
  file.container = Container::kRaw;
  file.bytes = info.bytes;
  file.staged = StagedName(name, file.id);
  TC_ASSIGN_OR_RETURN(
      File out,
      staging.OpenFile(file.staged, {.write = true, .create_new = true}));
  std::vector<std::byte> buffer(std::min(kSegmentBytes, info.bytes));
  for (uint64_t at = 0; at < info.bytes; at += kSegmentBytes) {
    const MutableByteSpan bytes =
        MutableByteSpan(buffer).first(std::min(kSegmentBytes, info.bytes - at));
    TC_RETURN_IF_ERROR(in.ReadExact(bytes, at));
    file.crc32c.push_back(Crc32c(0, bytes.data(), bytes.size()));
    TC_RETURN_IF_ERROR(out.WriteAll(bytes, at));
  }
  TC_RETURN_IF_ERROR(out.Sync());
  TC_RETURN_IF_ERROR(out.Close());
  return file;
}

}  // namespace

Status AddStagedExtras(const Directory& staging,
                       const std::vector<std::string>& paths,
                       const std::string& subdirectory,
                       CommitRequest* request) {
  for (const std::string& path : paths) {
    TC_ASSIGN_OR_RETURN(StagedFile file, AddExtra(staging, path, subdirectory));
    request->files.push_back(std::move(file));
  }
  return {};
}

}  // namespace torch_ckpt
