#include "engine/open/read_torch.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/open/archives.h"
#include "engine/open/not_weights.h"
#include "engine/open/numbered_files.h"
#include "engine/open/read_index.h"
#include "engine/open/torch_leaves.h"
#include "format/names.h"
#include "format/ours/catalog_builder.h"
#include "format/safetensors/hf_index.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr int kThreads = 4;
constexpr std::string_view kSuffix = ".bin";
constexpr std::string_view kIndexEnd = ".bin.index.json";
constexpr std::array<std::string_view, 3> kStems = {
    "pytorch_model", "diffusion_pytorch_model", "adapter_model"};

bool IsWeights(std::string_view name) {
  const auto numbered = ParseNumberedName(name, kSuffix);
  return std::any_of(kStems.begin(), kStems.end(), [&](std::string_view stem) {
    return numbered ? numbered->stem == stem
                    : name.size() == stem.size() + kSuffix.size() &&
                          name.starts_with(stem) && name.ends_with(kSuffix);
  });
}

// What a file is that begins without an archive.
Status NoArchive(const File& file) {
  TC_RETURN_IF_ERROR(CheckNoStandIn(file));
  std::string begin(512, '\0');
  TC_ASSIGN_OR_RETURN(
      const uint64_t count,
      file.Read({reinterpret_cast<std::byte*>(begin.data()), begin.size()}, 0));
  begin.resize(count);
  // The first pickle of the format before zip: a number of 10 bytes.
  if (begin.starts_with(
          std::string_view("\x80\x02\x8a\nl\xfc\x9c\x46\xf9", 9))) {
    return Unsupported(
        "is of torch.save before torch 1.6, or without zip: torch.load it and "
        "torch.save it again");
  }
  if (begin.size() > 262 && begin.compare(257, 5, "ustar") == 0) {
    return Unsupported(
        "is a tar archive of torch.save before torch 0.1.10, which is not "
        "read");
  }
  if (begin.starts_with('\x80')) {
    return Unsupported("is a bare pickle, and no archive of torch.save");
  }
  return Corrupt(
      "is no archive of torch.save, and of no other format that is read");
}

struct FoundFile {
  FileInfo info;
  TorchLeaves leaves;
};

Result<FoundFile> LookInto(const File& file) {
  FoundFile out;
  TC_ASSIGN_OR_RETURN(out.info, file.Stat());
  constexpr uint64_t kLeast = 4;
  TC_ASSIGN_OR_RETURN(const bool zip, out.info.bytes < kLeast
                                          ? Result<bool>(false)
                                          : IsTorchArchive(file, 0));
  if (!zip) return NoArchive(file);
  TC_ASSIGN_OR_RETURN(out.leaves,
                      FindTorchLeaves(file, {0, out.info.bytes}, false));
  return out;
}

// Which files count, and the index that says so.
struct Chosen {
  std::vector<std::string> files;
  std::string index_name;
  std::optional<HfIndex> index;
};

// By their index: all that it names, and nothing else.
Status ChooseIndexed(const Directory& directory,
                     std::span<const std::string> names, Chosen* out) {
  TC_ASSIGN_OR_RETURN(out->index,
                      ReadIndex(directory, out->index_name, kSuffix));
  TC_ASSIGN_OR_RETURN(IndexedFiles indexed,
                      FilesOf(*out->index, directory, names));
  if (!indexed.missing.empty()) {
    return Incomplete("is named by " + out->index_name + " and is missing")
        .WithFile(directory.Join(indexed.missing[0]));
  }
  for (const std::string& name : out->files) {
    if (std::binary_search(indexed.all.begin(), indexed.all.end(), name)) {
      continue;
    }
    return Conflict("stands beside " + out->index_name +
                    ", which does not name it; move what you do not mean "
                    "elsewhere")
        .WithFile(directory.Join(name));
  }
  out->files = std::move(indexed.all);
  return {};
}

// That of a model first; empty where there is none.
std::string IndexAmong(std::span<const std::string> names) {
  for (const std::string_view stem : kStems) {
    std::string index = std::string(stem) + std::string(kIndexEnd);
    if (std::binary_search(names.begin(), names.end(), index)) return index;
  }
  return {};
}

Result<Chosen> Choose(const Directory& directory,
                      std::span<const std::string> names, bool is_file) {
  Chosen out;
  if (is_file) {
    out.files.push_back(names[0]);
    return out;
  }
  out.files = TorchWeights(names);
  out.index_name = IndexAmong(names);
  if (!out.index_name.empty()) {
    TC_RETURN_IF_ERROR(ChooseIndexed(directory, names, &out));
    return out;
  }
  TC_RETURN_IF_ERROR(CheckNumbers(out.files, kSuffix));
  std::set<std::pair<std::string_view, int64_t>> sets;
  for (const std::string& name : out.files) {
    const auto numbered = ParseNumberedName(name, kSuffix);
    sets.insert(numbered ? std::pair(numbered->stem, numbered->count)
                         : std::pair(std::string_view(name), int64_t{0}));
  }
  if (sets.size() > 1) {
    return Conflict("holds weights more than once, " + out.files.front() +
                    " and " + out.files.back() +
                    "; give the path of the file that you mean");
  }
  return out;
}

}  // namespace

std::vector<std::string> TorchWeights(std::span<const std::string> names) {
  std::vector<std::string> out;
  std::copy_if(names.begin(), names.end(), std::back_inserter(out), IsWeights);
  return out;
}

bool IsTorchIndex(std::string_view name) {
  return std::any_of(kStems.begin(), kStems.end(), [&](std::string_view stem) {
    return name == std::string(stem) + std::string(kIndexEnd);
  });
}

bool HasTorchWeights(std::span<const std::string> names) {
  return std::any_of(names.begin(), names.end(), IsWeights);
}

Result<bool> IsTorchWeights(const Directory& directory,
                            std::span<const std::string> names) {
  if (HasTorchWeights(names)) return true;
  const std::string index_name = IndexAmong(names);
  if (index_name.empty()) return false;
  const Result<HfIndex> index = ReadIndex(directory, index_name, kSuffix);
  if (!index.ok()) return false;
  TC_ASSIGN_OR_RETURN(const IndexedFiles files,
                      FilesOf(*index, directory, names));
  return files.missing.size() < files.all.size();
}

Result<ForeignCatalog> ReadTorchFiles(const Directory& directory,
                                      std::span<const std::string> names,
                                      bool is_file) {
  Result<Chosen> chosen = Choose(directory, names, is_file);
  if (!chosen.ok()) return chosen.status().WithFile(directory.path());
  const std::vector<std::string>& files = chosen->files;
  std::vector<FoundFile> found(files.size());
  CatalogBuilder catalog;
  TorchLeavesAdder adder(&catalog);
  // Values of a file live as long as its archive: nothing looks at them later.
  TC_RETURN_IF_ERROR(ForEachItem(
      kThreads, static_cast<int64_t>(files.size()), nullptr,
      [&](int64_t item, int) -> Status {
        const auto i = static_cast<size_t>(item);
        TC_ASSIGN_OR_RETURN(const File file, directory.OpenFile(files[i], {}));
        Result<FoundFile> looked = LookInto(file);
        if (!looked.ok()) return looked.status().WithFile(file.path());
        found[i] = std::move(looked).value();
        return {};
      }));
  ForeignCatalog out;
  out.source = "torch";
  for (size_t i = 0; i < files.size(); ++i) {
    Status added =
        adder.Add(static_cast<uint32_t>(i), files[i], found[i].leaves);
    if (!added.ok()) {
      const bool of_two = added.kind() == ErrorKind::kConflict;
      return std::move(added).WithFile(of_two ? directory.path()
                                              : directory.Join(files[i]));
    }
    out.AddFile(files[i], found[i].info);
    out.archives.push_back({static_cast<uint32_t>(i), found[i].leaves.range});
  }
  if (chosen->index) {
    NoteAbsent(
        *chosen->index, chosen->index_name,
        [&](const std::string& name) { return adder.Has(name); }, &out.notes);
  }
  out.identity = IdentityOf(out.files, out.infos);
  Status finished = adder.Finish(&out);
  if (!finished.ok()) return std::move(finished).WithFile(directory.path());
  return out;
}

}  // namespace torch_ckpt
