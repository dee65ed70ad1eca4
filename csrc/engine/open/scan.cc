#include "engine/open/scan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/open/build_catalog.h"
#include "engine/open/numbered_files.h"
#include "engine/open/read_index.h"
#include "format/names.h"
#include "format/safetensors/hf_index.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr int kScanThreads = 4;

// `infos`: what the files are before that.
Result<std::vector<NamedHeader>> ReadHeaders(
    const Directory& directory, const std::vector<std::string>& names,
    std::vector<FileInfo>* infos) {
  std::vector<NamedHeader> headers(names.size());
  infos->resize(names.size());
  TC_RETURN_IF_ERROR(ForEachItem(
      kScanThreads, static_cast<int64_t>(names.size()), nullptr,
      [&](int64_t item, int) -> Status {
        const auto i = static_cast<size_t>(item);
        TC_ASSIGN_OR_RETURN(const File file, directory.OpenFile(names[i], {}));
        TC_ASSIGN_OR_RETURN((*infos)[i], file.Stat());
        TC_ASSIGN_OR_RETURN(headers[i].file, ReadFileHeader(file, (*infos)[i]));
        headers[i].name = names[i];
        headers[i].position = static_cast<uint32_t>(i);
        return {};
      }));
  return headers;
}

// The catalog of the files `names`, which are added to `out`.
Result<CatalogBuilder> ReadCatalog(const Directory& directory,
                                   const std::vector<std::string>& names,
                                   ForeignCatalog* out) {
  TC_ASSIGN_OR_RETURN(std::vector<NamedHeader> headers,
                      ReadHeaders(directory, names, &out->infos));
  Result<CatalogBuilder> catalog =
      BuildCatalog(headers, BoxProof::kTiling, &out->hulls);
  const bool ours = std::any_of(headers.begin(), headers.end(),
                                [](const NamedHeader& header) {
                                  return !header.file.sharding.file_id.empty();
                                });
  if (ours) {
    out->notes.push_back(
        "has files of a save of torch_ckpt without its " +
        std::string(kManifestName) +
        ", which has their digests: nothing of them is verified");
  }
  for (NamedHeader& header : headers) {
    ManifestFile& file = out->files.emplace_back();
    file.name = std::move(header.name);
    file.id = std::move(header.file.sharding.file_id);
    file.bytes = header.file.header.file_bytes;
  }
  return catalog;
}

// Files beside those that are read: left over from a consolidation in place, or
// stale. `files` are those of `others`; `read` says which are read.
Status CheckAgree(const std::string& read, const CatalogBuilder& final_files,
                  const CatalogBuilder& others,
                  const std::vector<std::string>& files) {
  for (uint32_t e = 0; e < others.size(); ++e) {
    const CatalogBuilder::Entry& shard = others.entry(e);
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        others.Placements(e));
    const std::string& file = files[placements[0].file];
    const int64_t id = final_files.Find(shard.name);
    if (id < 0) {
      return Conflict("is in " + file + " but not in " + read +
                      ": move what you do not mean elsewhere")
          .WithTensor(shard.name);
    }
    const CatalogBuilder::Entry& entry =
        final_files.entry(static_cast<uint32_t>(id));
    if (entry.dtype != shard.dtype || !(entry.shape == shard.shape)) {
      return Conflict("differs between " + read + " (" +
                      DtypeName(entry.dtype) + " " + entry.shape.ToString() +
                      ") and " + file + " (" + DtypeName(shard.dtype) + " " +
                      shard.shape.ToString() + ")")
          .WithTensor(shard.name);
    }
  }
  return {};
}

bool IsDataName(const std::string& name) {
  return name.size() > kDataSuffix.size() && name.ends_with(kDataSuffix) &&
         name[0] != '.';
}

// The index to go by: that of a model, else the only one there is.
std::string IndexOf(std::span<const std::string> names) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name == kIndexName) return name;
    if (name.ends_with(kIndexSuffix) && name[0] != '.') found.push_back(name);
  }
  return found.size() == 1 ? found[0] : std::string();
}

// "model.fp16.safetensors" beside "model.safetensors" (`names` are sorted):
// the same tensors in another dtype, for those who ask for that variant.
bool IsVariant(std::string_view name, std::span<const std::string_view> names) {
  return std::any_of(
      kFinalStems.begin(), kFinalStems.end(), [&](std::string_view stem) {
        const std::string single = std::string(stem) + std::string(kDataSuffix);
        return name.starts_with(std::string(stem) + ".") && name != single &&
               std::binary_search(names.begin(), names.end(), single);
      });
}

// Which files of a directory count.
struct Listing {
  std::string index_name;  // empty: none
  std::optional<HfIndex> index;
  std::vector<std::string> indexed;  // by the index, there or not
  std::vector<std::string> missing;  // of these
  std::vector<std::string> shards;   // not by the index, but they count
  std::vector<std::string> single;   // the file that would hide an index
  std::vector<std::string> beside;   // nobody reads them
};

// Where there is no index: the one file that transformers takes, whatever else
// is there. Empty where there is none, and where shards stand beside it, which
// must hold other tensors. `data` is sorted.
Result<std::string> OnlyFile(const Directory& directory,
                             std::span<const std::string_view> data) {
  std::string only;
  for (const std::string_view stem : kFinalStems) {
    std::string single = std::string(stem) + std::string(kDataSuffix);
    if (!std::binary_search(data.begin(), data.end(), single)) continue;
    if (!only.empty()) {
      return Conflict("holds two models, " + only + " and " + single +
                      "; give the path of the file that you mean")
          .WithFile(directory.path());
    }
    only = std::move(single);
  }
  const bool shards = std::any_of(data.begin(), data.end(), IsShardName);
  return shards ? std::string() : only;
}

Result<Listing> ListFiles(const Directory& directory,
                          std::span<const std::string> names) {
  std::vector<std::string_view> data;  // of `names`
  std::copy_if(names.begin(), names.end(), std::back_inserter(data),
               IsDataName);
  if (data.empty() && IndexOf(names).empty()) {
    return Incomplete("its .safetensors files are gone")
        .WithFile(directory.path());
  }
  Listing list;
  list.index_name = IndexOf(names);
  std::string single, only;
  if (!list.index_name.empty()) {
    TC_ASSIGN_OR_RETURN(list.index, ReadIndex(directory, list.index_name));
    TC_ASSIGN_OR_RETURN(IndexedFiles indexed,
                        FilesOf(*list.index, directory, names));
    list.indexed = std::move(indexed.all);
    list.missing = std::move(indexed.missing);
    single = SingleFileName(list.index_name);
  } else {
    TC_ASSIGN_OR_RETURN(only, OnlyFile(directory, data));
  }
  std::vector<std::string_view> others;
  std::set_difference(data.begin(), data.end(), list.indexed.begin(),
                      list.indexed.end(), std::back_inserter(others));
  for (const std::string_view name : others) {
    const bool counts = list.index     ? IsShardName(name)
                        : only.empty() ? !IsVariant(name, data)
                                       : name == only;
    (name == single ? list.single
     : counts       ? list.shards
                    : list.beside)
        .emplace_back(name);
  }
  return list;
}

// The shards beside an index whose files are not all there count only when they
// hold everything that it names.
Status CheckNothingIsMissing(const Directory& directory, const Listing& list,
                             const CatalogBuilder& catalog) {
  if (list.missing.empty()) return {};
  for (const auto& [name, file] : list.index->weight_map) {
    if (catalog.Find(name) >= 0) continue;
    return Incomplete("is named by " + list.index_name +
                      ", and neither its file " + file +
                      " nor another one has it")
        .WithTensor(name)
        .WithFile(directory.path());
  }
  return {};
}

// Files beside those that make up `catalog`, of the index or the single file
// before it, hold the same. `indexed`: what the index names and is there.
Status CheckBeside(const Directory& directory, const Listing& list,
                   const std::vector<std::string>& indexed,
                   const CatalogBuilder& catalog) {
  const bool single = !list.single.empty();
  const std::string read = single ? list.single[0] : "the indexed files";
  const auto check = [&](const std::vector<std::string>& files,
                         bool all) -> Status {
    if (files.empty()) return {};
    ForeignCatalog others;
    TC_ASSIGN_OR_RETURN(const CatalogBuilder of_files,
                        ReadCatalog(directory, files, &others));
    TC_RETURN_IF_ERROR(CheckAgree(read, catalog, of_files, files));
    if (!all) return {};
    return CheckAgree("the indexed files", of_files, catalog, list.single);
  };
  TC_RETURN_IF_ERROR(check(list.shards, false));
  return single ? check(indexed, list.missing.empty()) : Status();
}

}  // namespace

bool HasSafetensors(std::span<const std::string> names) {
  return std::any_of(names.begin(), names.end(), IsDataName);
}

Result<bool> IsSafetensors(const Directory& directory,
                           std::span<const std::string> names) {
  if (HasSafetensors(names)) return true;
  const std::string index_name = IndexOf(names);
  if (index_name.empty()) return false;
  const Result<HfIndex> index = ReadIndex(directory, index_name);
  if (!index.ok()) return false;  // others may be there: CheckIndexAlone
  TC_ASSIGN_OR_RETURN(const IndexedFiles files,
                      FilesOf(*index, directory, names));
  return files.missing.size() < files.all.size();
}

Status CheckIndexAlone(const Directory& directory,
                       std::span<const std::string> names) {
  const std::string index_name = IndexOf(names);
  if (index_name.empty()) return {};
  TC_ASSIGN_OR_RETURN(const HfIndex index, ReadIndex(directory, index_name));
  TC_ASSIGN_OR_RETURN(const IndexedFiles files,
                      FilesOf(index, directory, names));
  if (files.missing.empty()) return {};
  return Incomplete("is named by " + index_name + " and is missing")
      .WithFile(directory.Join(files.missing[0]));
}

Result<ForeignCatalog> ReadSafetensors(const Directory& directory,
                                       std::span<const std::string> names,
                                       bool) {
  TC_ASSIGN_OR_RETURN(Listing list, ListFiles(directory, names));
  if (!list.missing.empty() && list.shards.empty() && list.single.empty()) {
    return Incomplete("is named by " + list.index_name + " and is missing")
        .WithFile(directory.Join(list.missing[0]));
  }
  ForeignCatalog result;
  // Whatever else an index names: transformers takes the single file first.
  const bool by_single = !list.single.empty();
  const bool by_index =
      !by_single && list.index && list.missing.empty() && !list.indexed.empty();
  result.source = by_index ? "index" : "headers";
  std::vector<std::string> indexed;  // and there
  std::set_difference(list.indexed.begin(), list.indexed.end(),
                      list.missing.begin(), list.missing.end(),
                      std::back_inserter(indexed));
  std::vector<std::string> read = by_single ? list.single : indexed;
  if (!by_single && !by_index) {
    read.insert(read.end(), list.shards.begin(), list.shards.end());
    std::sort(read.begin(), read.end());
  }
  if (!list.index) {
    Status whole = CheckNumbers(read, kDataSuffix);
    if (!whole.ok()) return std::move(whole).WithFile(directory.path());
  }
  Result<CatalogBuilder> catalog = ReadCatalog(directory, read, &result);
  if (!catalog.ok()) return catalog.status().WithFile(directory.path());
  TC_RETURN_IF_ERROR(CheckNothingIsMissing(directory, list, *catalog));
  if (by_index || by_single) {
    Status status = CheckBeside(directory, list, indexed, *catalog);
    if (!status.ok()) return std::move(status).WithFile(directory.path());
    NoteAbsent(
        *list.index, list.index_name,
        [&](const std::string& name) { return catalog->Find(name) >= 0; },
        &result.notes);
  }
  list.index.reset();  // its memory, before the catalog takes as much
  result.identity = IdentityOf(result.files, result.infos);
  TC_ASSIGN_OR_RETURN(result.catalog,
                      Catalog::From(std::move(catalog).value(), result.files));
  if (by_single) {
    list.beside.insert(list.beside.end(), indexed.begin(), indexed.end());
    std::sort(list.beside.begin(), list.beside.end());
  }
  result.beside = std::move(list.beside);
  return result;
}

}  // namespace torch_ckpt
