// Requests for what is no tensor: leaves in objects files and in archives.
#include <array>
#include <string>
#include <vector>

#include "capi/requests.h"
#include "engine/open/archives.h"
#include "json/held.h"
#include "os/directory.h"
#include "os/path.h"

namespace torch_ckpt::capi {

// Where the archive is that an object is in, for who unpickles it.
Result<Json> ArchiveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "name"));
  const Catalog& catalog = checkpoint->catalog();
  const int64_t found = catalog.Find(name);
  const CatalogEntry* const entry =
      found < 0 ? nullptr : &catalog.entries()[static_cast<size_t>(found)];
  if (entry == nullptr || !entry->archived ||
      entry->archived->archive.size() == 0) {
    return Incomplete("is in no archive of the checkpoint").WithTensor(name);
  }
  const ArchivedObject& archived = *entry->archived;
  return Json{{"file", checkpoint->files()[entry->file].name},
              {"begin", archived.archive.begin},
              {"bytes", archived.archive.size()},
              {"leaf", archived.leaf},
              {"path", std::string(entry->path)}};
}

// Objects that are archived in files, each as JSON text or as an error.
Result<Json> ReadObjectsRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      GetNames(request, "names"));
  const Catalog& catalog = checkpoint->catalog();
  std::vector<uint32_t> entries;
  for (const std::string& name : names) {
    const int64_t entry = catalog.Find(name);
    if (entry < 0 || !catalog.entries()[static_cast<size_t>(entry)].archived) {
      return Incomplete("is no archived object of the checkpoint")
          .WithTensor(name);
    }
    entries.push_back(static_cast<uint32_t>(entry));
  }
  TC_ASSIGN_OR_RETURN(std::vector<Result<std::string>> objects,
                      checkpoint->ArchivedObjects(entries));
  Json out = Json::array();
  for (Result<std::string>& each : objects) {
    out.push_back(each.ok() ? Json{{"text", std::move(each).value()}}
                            : ErrorJson(each.status()));
  }
  return Json{{"objects", std::move(out)}};
}

// What a file of torch.save holds, as text.
Result<Json> ReadArchiveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string given, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(given));
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(path)));
  TC_ASSIGN_OR_RETURN(const File file, parent.OpenFile(BaseName(path), {}));
  TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  TC_ASSIGN_OR_RETURN(const auto objects,
                      ReadArchivedObjects(file, {0, info.bytes},
                                          std::array{ArchivedObject{}.leaf}));
  TC_RETURN_IF_ERROR(objects[0].status());
  return Json{{"text", *objects[0]}};
}

// A whole objects file of ours, which is ASCII text, compared with its digests.
Result<Json> ObjectsFileRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "name"));
  const FileSet& files = *checkpoint->file_set();
  const int64_t file = files.FindFile(name);
  if (file < 0 || !files.has_digests() ||
      files.files()[static_cast<size_t>(file)].role != FileRole::kObjects) {
    return InvalidArgument("is no objects file of the checkpoint")
        .WithFile(files.path() + "/" + name);
  }
  std::string text;
  TC_RETURN_IF_ERROR(files.UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(text, files.ReadWhole(static_cast<uint32_t>(file)));
    return {};
  }));
  return Json{{"text", std::move(text)}};
}

}  // namespace torch_ckpt::capi
