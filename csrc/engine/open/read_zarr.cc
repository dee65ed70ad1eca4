#include "engine/open/read_zarr.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/byte_range.h"
#include "format/names.h"
#include "format/zarr/zarr_array.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr int kMaxDepth = 14;  // of directories; a name is below them
constexpr int kStatThreads = 32;
constexpr std::string_view kObjectBegin = "shard_", kObjectEnd = ".pt";
constexpr std::string_view kLockEnd = ".sync";

bool IsObject(std::string_view name) {
  return name.starts_with(kObjectBegin) && name.ends_with(kObjectEnd);
}

// Of a directory that is left out: <key>.sync has zarr's locks, and what begins
// with a dot is of others.
bool IsLeftOut(std::string_view name) {
  return name.starts_with('.') || name.ends_with(kLockEnd);
}

// A file that an entry is made of, before it was looked at.
struct WantedFile {
  std::string path;                    // below the directory
  std::optional<uint64_t> bytes = {};  // of a chunk
};

// The box of a chunk, and its strides where that is less than the chunk.
Placement PlaceOfChunk(const ZarrArray& array, const Dims& chunk,
                       uint32_t file) {
  Placement out;
  out.file = file;
  bool whole = true;
  for (int d = 0; d < array.shape.size(); ++d) {
    const int64_t begin = chunk[d] * array.chunks[d];
    const int64_t size = std::min(array.chunks[d], array.shape[d] - begin);
    out.box.offsets.push_back(begin);
    out.box.sizes.push_back(size);
    whole = whole && size == array.chunks[d];
  }
  if (whole) return out;
  // Chunks at an edge are as large as the others; what is beyond is padding.
  out.kind = PlacementKind::kStridedBox;
  int64_t stride = DtypeUnit(array.dtype).bytes;
  out.strides = Dims::Filled(array.shape.size(), 0);
  for (int d = array.shape.size() - 1; d >= 0; --d) {
    out.strides[d] = stride;
    stride *= array.chunks[d];
  }
  return out;
}

class TreeReader {
 public:
  TreeReader(const Directory& root, ForeignCatalog* found,
             CatalogBuilder* catalog)
      : root_(root),
        found_(*found),
        catalog_(*catalog),
        first_(found->files.size()) {}

  Status Run() {
    TC_RETURN_IF_ERROR(Visit(root_, "", 0));
    return LookAtFiles();
  }

 private:
  // `key`: of the directory, with a '/' at its end; empty for the root.
  Status Visit(const Directory& directory, const std::string& key, int depth) {
    TC_ASSIGN_OR_RETURN(std::vector<std::string> names, directory.List());
    const bool is_array =
        !key.empty() &&
        std::binary_search(names.begin(), names.end(), kZarrArrayName);
    if (is_array) {
      const Result<ZarrArray> array = ReadArray(directory);
      if (!array.ok()) {
        return Status(array.status())
            .WithFile(directory.Join(std::string(kZarrArrayName)));
      }
      TC_RETURN_IF_ERROR(AddTensor(directory, key, *array, &names));
    }
    for (const std::string& name : names) {
      if (!key.empty() && IsObject(name)) {
        TC_RETURN_IF_ERROR(AddObject(key, name));
        continue;
      }
      if (is_array && name == kZarrArrayName) continue;
      const Result<Directory> inner = directory.OpenDirectory(name);
      const int error = inner.status().sys_errno();
      if (error == ENOTDIR || error == ELOOP || error == ENOENT) {
        const bool is_lost = !key.empty() && !is_array;
        TC_RETURN_IF_ERROR(CheckStranger(directory, name, is_lost));
        continue;
      }
      if (IsLeftOut(name)) {
        if (inner.ok()) TC_RETURN_IF_ERROR(CheckLeftOut(*inner));
        continue;
      }
      if (!inner.ok()) return inner.status();
      Status fits = depth < kMaxDepth ? CheckFileName(name)
                                      : Unsupported("is too deep in the tree");
      if (!fits.ok()) return std::move(fits).WithFile(inner->path());
      TC_RETURN_IF_ERROR(Visit(*inner, key + name + "/", depth + 1));
    }
    return {};
  }

  static Result<ZarrArray> ReadArray(const Directory& directory) {
    const Result<std::string> text = directory.ReadFile(
        std::string(kZarrArrayName), kMaxZarrArrayBytes, {.no_follow = true});
    if (text.status().sys_errno() == ELOOP) {
      return Unsupported("is a link, and links are not followed");
    }
    if (!text.ok()) return text.status();
    return ParseZarrArray(*text);
  }

  // Of a name that is no directory: whether a tensor is lost with it. A link to
  // a directory may be a tensor, and so may one that leads nowhere: those to
  // files are as other files. `is_lost`: a chunk would be one without .zarray.
  static Status CheckStranger(const Directory& directory,
                              const std::string& name, bool is_lost) {
    TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                        directory.StatEntry(name));
    if (!info) return {};
    if (info->is_link) {
      const Result<std::optional<FileInfo>> to = directory.StatName(name);
      if (!to.ok() || !*to || (*to)->is_directory) {
        return Unsupported("is a link, and links are not followed")
            .WithFile(directory.Join(name));
      }
    }
    if (!is_lost || !IsZarrChunkName(name)) return {};
    return Incomplete("is missing, and beside it is a chunk, '" + name + "'")
        .WithFile(directory.Join(std::string(kZarrArrayName)));
  }

  // Of a directory that is left out: whether it is a tensor or has an object.
  // Locks are called as the files of their array are, .zarray too, but they are
  // empty. What is below may be anybody's: snapshots of the file system have
  // whole checkpoints.
  static Status CheckLeftOut(const Directory& directory) {
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
    for (const std::string& name : names) {
      if (name != kZarrArrayName && !IsObject(name)) continue;
      TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                          directory.StatEntry(name));
      if (!info || info->is_directory || info->bytes == 0) continue;
      return Unsupported(
                 "is of a key that is not read: a name in it begins with a dot "
                 "or ends in .sync")
          .WithFile(directory.Join(name));
    }
    return {};
  }

  // Takes the chunks out of `names`.
  Status AddTensor(const Directory& directory, const std::string& key,
                   const ZarrArray& array, std::vector<std::string>* names) {
    const std::string name = key.substr(0, key.size() - 1);
    const int dims = array.shape.size();
    std::vector<Dims> chunks;
    std::vector<std::string> others;
    for (std::string& each : *names) {
      if (const auto chunk = ParseZarrChunkName(each, dims)) {
        chunks.push_back(*chunk);
      } else {
        others.push_back(std::move(each));
      }
    }
    *names = std::move(others);
    Dims grid;
    for (int d = 0; d < dims; ++d) {
      grid.push_back((array.shape[d] + array.chunks[d] - 1) / array.chunks[d]);
    }
    for (const Dims& chunk : chunks) {
      for (int d = 0; d < dims; ++d) {
        if (chunk[d] < grid[d]) continue;
        return Corrupt("is a chunk that a tensor of shape " +
                       array.shape.ToString() + " in chunks of " +
                       array.chunks.ToString() + " does not have")
            .WithFile(directory.Join(NameOf(chunk)));
      }
    }
    TC_RETURN_IF_ERROR(CheckAllThere(directory, grid, chunks));
    if (!array.other_dtype.empty()) return AddUnread(name, array, chunks);
    TC_ASSIGN_OR_RETURN(const uint32_t entry,
                        catalog_.AddTensor(name, array.dtype, array.shape));
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        ByteSize(array.dtype, array.chunks));
    for (const Dims& chunk : chunks) {
      TC_RETURN_IF_ERROR(catalog_.AddPlacement(
          entry,
          PlaceOfChunk(array, chunk, NextFile(key + NameOf(chunk), bytes))));
    }
    return {};
  }

  static std::string NameOf(const Dims& chunk) {
    return ZarrChunkName({chunk.begin(), static_cast<size_t>(chunk.size())});
  }

  // Chunks are each in the grid, and each once: so they are all where they are
  // as many. Else the first that is missing is among the first ones.
  static Status CheckAllThere(const Directory& directory, const Dims& grid,
                              const std::vector<Dims>& chunks) {
    uint64_t due = 1;
    for (const int64_t count : grid) {
      const auto size = static_cast<uint64_t>(count);
      // More than any directory has is as good as all of them.
      due = size == 0 ? 0 : std::min(due, UINT64_MAX / size) * size;
    }
    if (chunks.size() == due) return {};
    std::vector<std::string> there;
    for (const Dims& chunk : chunks) there.push_back(NameOf(chunk));
    std::sort(there.begin(), there.end());
    Dims next = Dims::Filled(grid.size(), 0);
    while (std::binary_search(there.begin(), there.end(), NameOf(next))) {
      int d = grid.size() - 1;
      while (d > 0 && next[d] + 1 == grid[d]) next[d--] = 0;
      ++next[d];
    }
    return Incomplete("is missing: the tensor has " + std::to_string(due) +
                      " chunks, and " + std::to_string(chunks.size()) +
                      " are there")
        .WithFile(directory.Join(NameOf(next)));
  }

  // To the catalog it is an object.
  Status AddUnread(const std::string& name, const ZarrArray& array,
                   const std::vector<Dims>& chunks) {
    if (chunks.empty()) {
      return Unsupported("is an empty tensor of " + array.other_dtype)
          .WithTensor(name);
    }
    const uint32_t file = NextFile(name + "/" + NameOf(chunks[0]), {});
    TC_RETURN_IF_ERROR(
        catalog_.AddObject(name, file, ArchivedObject{}).status());
    found_.unread[name] = {
        array.other_dtype, array.shape,
        "is " + array.other_dtype + ", which safetensors has no name for"};
    return {};
  }

  Status AddObject(const std::string& key, const std::string& file_name) {
    const std::string name =
        key + file_name.substr(0, file_name.size() - kObjectEnd.size());
    objects_.push_back({name, NextFile(key + file_name, {})});
    return {};
  }

  uint32_t NextFile(std::string path, std::optional<uint64_t> bytes) {
    files_.push_back({std::move(path), bytes});
    return static_cast<uint32_t>(first_ + files_.size() - 1);
  }

  // Each of `files_`: its place in `found_` is known already.
  Status LookAtFiles() {
    std::vector<FileInfo> infos(files_.size());
    TC_RETURN_IF_ERROR(
        ForEachItem(kStatThreads, static_cast<int64_t>(files_.size()), nullptr,
                    [&](int64_t i, int) -> Status {
                      return LookAt(files_[static_cast<size_t>(i)],
                                    &infos[static_cast<size_t>(i)]);
                    }));
    for (size_t i = 0; i < files_.size(); ++i) {
      found_.AddFile(std::move(files_[i].path), infos[i]);
    }
    for (const auto& [name, file] : objects_) {
      TC_RETURN_IF_ERROR(
          catalog_
              .AddObject(name, file,
                         ArchivedObject{{0, found_.files[file].bytes}, 0})
              .status());
    }
    return {};
  }

  Status LookAt(const WantedFile& file, FileInfo* out) const {
    TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                        root_.StatEntry(file.path));
    const std::string path = root_.Join(file.path);
    if (!info) return Incomplete("went while it was read").WithFile(path);
    if (!info->is_regular) return Corrupt("is no file").WithFile(path);
    if (file.bytes && info->bytes != *file.bytes) {
      const std::string what = "has " + std::to_string(info->bytes) +
                               " bytes, and its chunk has " +
                               std::to_string(*file.bytes);
      return (info->bytes < *file.bytes ? Incomplete(what) : Corrupt(what))
          .WithFile(path);
    }
    *out = *info;
    return {};
  }

  const Directory& root_;
  ForeignCatalog& found_;
  CatalogBuilder& catalog_;
  const size_t first_;  // of the files here, among all
  std::vector<WantedFile> files_;
  std::vector<std::pair<std::string, uint32_t>> objects_;
};

}  // namespace

Status ReadZarrTree(const Directory& directory, ForeignCatalog* found,
                    CatalogBuilder* catalog) {
  return TreeReader(directory, found, catalog).Run();
}

}  // namespace torch_ckpt
