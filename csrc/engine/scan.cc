#include "engine/scan.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/build_catalog.h"
#include "format/hf_index.h"
#include "format/names.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr int kScanThreads = 4;

Result<std::vector<NamedHeader>> ReadHeaders(
    const Directory& directory, const std::vector<std::string>& names) {
  std::vector<NamedHeader> headers(names.size());
  TC_RETURN_IF_ERROR(ForEachItem(
      kScanThreads, static_cast<int64_t>(names.size()), nullptr,
      [&](int64_t item, int) -> Status {
        const auto i = static_cast<size_t>(item);
        TC_ASSIGN_OR_RETURN(const File file, directory.OpenFile(names[i], {}));
        TC_ASSIGN_OR_RETURN(headers[i].file, ReadFileHeader(file));
        headers[i].name = names[i];
        headers[i].position = static_cast<uint32_t>(i);
        return {};
      }));
  return headers;
}

// The index and the headers of its files must name the same tensors.
Status CheckIndex(const HfIndex& index, const CatalogBuilder& catalog,
                  const std::vector<std::string>& files) {
  for (const auto& [name, file] : index.weight_map) {
    const int64_t id = catalog.Find(name);
    if (id < 0) {
      return Incomplete("the index says it is in " + file +
                        ", which does not hold it")
          .WithTensor(name);
    }
    bool found = false;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog.Placements(static_cast<uint32_t>(id)));
    for (const Placement& p : placements) {
      found = found || files[p.file] == file;
    }
    if (!found) {
      return Conflict("the index says it is in " + file +
                      ", it is in another file")
          .WithTensor(name);
    }
  }
  std::set<std::string_view> indexed;
  for (const auto& [name, file] : index.weight_map) indexed.insert(name);
  for (uint32_t e = 0; e < catalog.size(); ++e) {
    const std::string& name = catalog.entry(e).name;
    if (indexed.contains(name)) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog.Placements(e));
    return Conflict("is in " + files[placements[0].file] +
                    ", but the index does not name it")
        .WithTensor(name);
  }
  return {};
}

// Files "-of-N" without an index: all N, whichever ranks have written them.
Status CheckNumbers(const std::vector<std::string>& names) {
  struct Group {
    std::set<int64_t> indices;
    std::string_view example;
  };
  std::map<std::pair<std::string_view, int64_t>, Group> groups;
  for (const std::string& name : names) {
    const auto numbered = ParseNumberedName(name);
    if (!numbered) continue;
    Group& group = groups[{numbered->stem, numbered->count}];
    group.indices.insert(numbered->index);
    group.example = name;
  }
  for (const auto& [key, group] : groups) {
    if (static_cast<int64_t>(group.indices.size()) == key.second) continue;
    int64_t missing = 1;
    while (group.indices.contains(missing)) ++missing;
    return Incomplete("file " + std::to_string(missing) + " of " +
                      std::to_string(key.second) + " is missing beside " +
                      std::string(group.example));
  }
  return {};
}

// Shards beside an index: left over from a consolidation in place, or stale.
Status CheckAgree(const CatalogBuilder& final_files,
                  const CatalogBuilder& shards) {
  for (uint32_t e = 0; e < shards.size(); ++e) {
    const CatalogBuilder::Entry& shard = shards.entry(e);
    const int64_t id = final_files.Find(shard.name);
    if (id < 0) {
      return Conflict("is in the shards of the directory but not in its index")
          .WithTensor(shard.name);
    }
    const CatalogBuilder::Entry& entry =
        final_files.entry(static_cast<uint32_t>(id));
    if (entry.dtype != shard.dtype || !(entry.shape == shard.shape)) {
      return Conflict("differs between the indexed files (" +
                      std::string(DtypeName(entry.dtype)) + " " +
                      entry.shape.ToString() + ") and the shards (" +
                      DtypeName(shard.dtype) + " " + shard.shape.ToString() +
                      ")")
          .WithTensor(shard.name);
    }
  }
  return {};
}

bool IsDataName(const std::string& name) {
  return name.size() > kDataSuffix.size() && name.ends_with(kDataSuffix) &&
         name[0] != '.';
}

}  // namespace

Result<ScanResult> ScanDirectory(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  std::vector<std::string> data;
  std::copy_if(names.begin(), names.end(), std::back_inserter(data),
               IsDataName);
  if (data.empty()) {
    std::string hint;
    if (std::find(names.begin(), names.end(), "sharded") != names.end()) {
      hint = "; its subdirectory 'sharded' may hold one";
    }
    return Incomplete("holds no checkpoint: neither " +
                      std::string(kManifestName) +
                      " nor any .safetensors file" + hint)
        .WithFile(directory.path());
  }
  std::vector<std::string> indexed;
  std::optional<HfIndex> index;
  if (std::binary_search(names.begin(), names.end(), kIndexName)) {
    const std::string index_name(kIndexName);
    TC_ASSIGN_OR_RETURN(const std::string text,
                        directory.ReadFile(index_name, kMaxIndexBytes));
    Result<HfIndex> parsed = ParseHfIndex(AsBytes(text));
    if (!parsed.ok()) {
      return parsed.status().WithFile(directory.Join(index_name));
    }
    index = std::move(parsed).value();
    std::set<std::string> wanted;
    for (const auto& [name, file] : index->weight_map) wanted.insert(file);
    indexed.assign(wanted.begin(), wanted.end());
  }
  std::vector<std::string> missing;
  std::set_difference(indexed.begin(), indexed.end(), data.begin(), data.end(),
                      std::back_inserter(missing));
  std::vector<std::string> others;
  std::set_difference(data.begin(), data.end(), indexed.begin(), indexed.end(),
                      std::back_inserter(others));
  if (index && !missing.empty() && others.empty()) {
    return Incomplete("is named by " + std::string(kIndexName) +
                      " and is missing")
        .WithFile(directory.Join(missing[0]));
  }
  ScanResult result;
  result.by_index = index && missing.empty() && !indexed.empty();
  if (!index) {
    Status whole = CheckNumbers(data);
    if (!whole.ok()) return std::move(whole).WithFile(directory.path());
  }
  const std::vector<std::string>& files = result.by_index ? indexed : data;
  TC_ASSIGN_OR_RETURN(const std::vector<NamedHeader> headers,
                      ReadHeaders(directory, files));
  Result<CatalogBuilder> catalog =
      BuildCatalog(headers, BoxProof::kTiling, &result.hulls);
  if (!catalog.ok()) return catalog.status().WithFile(directory.path());
  if (!missing.empty()) {
    // The shards beside an index whose files are not all there count only when
    // they hold everything that it names.
    for (const auto& [name, file] : index->weight_map) {
      if (catalog->Find(name) >= 0) continue;
      return Incomplete("is named by " + std::string(kIndexName) +
                        ", and neither its file " + file +
                        " nor another one has it")
          .WithTensor(name)
          .WithFile(directory.path());
    }
  }
  if (result.by_index) {
    Status status = CheckIndex(*index, *catalog, files);
    if (status.ok() && !others.empty()) {
      TC_ASSIGN_OR_RETURN(const std::vector<NamedHeader> shards,
                          ReadHeaders(directory, others));
      Result<CatalogBuilder> shard_catalog = BuildCatalog(shards);
      if (!shard_catalog.ok()) {
        return shard_catalog.status().WithFile(directory.path());
      }
      status = CheckAgree(*catalog, *shard_catalog);
    }
    if (!status.ok()) return std::move(status).WithFile(directory.path());
  }
  for (const NamedHeader& header : headers) {
    ManifestFile file;
    file.name = header.name;
    file.id = header.file.sharding.file_id;
    file.bytes = header.file.header.file_bytes;
    result.files.push_back(std::move(file));
  }
  TC_ASSIGN_OR_RETURN(std::string encoded, catalog->Encode());
  TC_ASSIGN_OR_RETURN(result.catalog,
                      Catalog::Parse(std::move(encoded), result.files));
  return result;
}

}  // namespace torch_ckpt
