#include "engine/open/read_torch.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/open/numbered_files.h"
#include "engine/open/torch_archive.h"
#include "format/catalog_builder.h"
#include "format/hf_index.h"
#include "format/names.h"
#include "format/torch_state.h"
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

// A leaf of a file, and where it is.
struct FoundLeaf {
  StateLeaf leaf;  // its value lives no longer than the archive
  Dtype dtype = Dtype::kU8;
  std::optional<Placement> tensor;  // none: an object
};

struct FoundFile {
  FileInfo info;
  std::vector<FoundLeaf> leaves;
  std::vector<StateContainer> containers;
};

Result<FoundFile> LookInto(const File& file) {
  FoundFile out;
  TC_ASSIGN_OR_RETURN(out.info, file.Stat());
  constexpr uint64_t kLeast = 4;
  TC_ASSIGN_OR_RETURN(const bool zip, out.info.bytes < kLeast
                                          ? Result<bool>(false)
                                          : IsTorchArchive(file, 0));
  if (!zip) return NoArchive(file);
  TC_ASSIGN_OR_RETURN(
      const TorchArchive archive,
      TorchArchive::Open(file, {0, out.info.bytes}, kMaxObjectPickle));
  TC_ASSIGN_OR_RETURN(TorchState state,
                      FlattenState(archive.root(), archive.pickle_bytes()));
  out.containers = std::move(state.containers);
  for (StateLeaf& leaf : state.leaves) {
    FoundLeaf& found = out.leaves.emplace_back();
    found.leaf = std::move(leaf);
    if (!IsTorchTensor(*found.leaf.value)) continue;
    const auto located = [&]() -> Status {
      TC_ASSIGN_OR_RETURN(const TorchTensor tensor,
                          ReadTorchTensor(*found.leaf.value));
      TC_ASSIGN_OR_RETURN(found.tensor, archive.Find(tensor));
      found.dtype = tensor.dtype;
      return {};
    }();
    // What can be no placement is an object, which says so when it is read.
    if (located.ok() || located.kind() == ErrorKind::kUnsupported) continue;
    return Status(located).WithTensor(found.leaf.name);
  }
  return out;
}

// The same bytes in the same way: tied tensors are stored once.
using Place = std::tuple<uint32_t, uint64_t, Dtype, std::vector<int64_t>>;

Place PlaceOf(uint32_t file, const FoundLeaf& found) {
  std::vector<int64_t> numbers(found.tensor->box.sizes.begin(),
                               found.tensor->box.sizes.end());
  numbers.insert(numbers.end(), found.tensor->strides.begin(),
                 found.tensor->strides.end());
  return {file, found.tensor->offset, found.dtype, std::move(numbers)};
}

class Merger {
 public:
  Status Add(uint32_t number, const ManifestFile& file,
             const FoundFile& found) {
    for (size_t i = 0; i < found.leaves.size(); ++i) {
      const FoundLeaf& leaf = found.leaves[i];
      const std::string& name = leaf.leaf.name;
      if (catalog_.Find(name) >= 0) {
        return Conflict("is in " + file.name + " and in another file")
            .WithTensor(name);
      }
      TC_ASSIGN_OR_RETURN(
          const uint32_t entry,
          leaf.tensor
              ? AddTensor(number, leaf)
              : catalog_.AddObject(name, number,
                                   ArchivedObject{{0, file.bytes}, i + 1}));
      catalog_.SetPath(entry, leaf.leaf.path);
      files_.emplace(name, number);
    }
    // As the ranks of a save: the first says the kind, keys are united.
    for (const StateContainer& each : found.containers) {
      const auto [at, fresh] =
          by_path_.try_emplace(each.path, containers_.size());
      if (fresh) {
        containers_.push_back(each);
        continue;
      }
      StateContainer& known = containers_[at->second];
      if (known.kind == "list" || each.kind == "list") {
        known.count = std::max(known.count, each.count);
        continue;
      }
      std::set<std::string> keys(known.keys.begin(), known.keys.end());
      for (const std::string& key : each.keys) {
        if (keys.insert(key).second) known.keys.push_back(key);
      }
    }
    return {};
  }

  Status Finish(const std::string& path, ForeignCatalog* out) {
    const std::string structure = StructureJson(containers_);
    if (!structure.empty() && !out->files.empty()) {
      const std::string name(kStructureName);
      TC_RETURN_IF_ERROR(
          catalog_.AddObject(name, 0, ArchivedObject{}).status());
      out->made_objects[name] = structure;
    }
    TC_ASSIGN_OR_RETURN(std::string encoded, catalog_.Encode());
    Result<Catalog> parsed = Catalog::Parse(std::move(encoded), out->files);
    if (!parsed.ok()) return parsed.status().WithFile(path);
    out->catalog = std::move(parsed).value();
    return {};
  }

  // Whether file `number` has it.
  bool Has(const std::string& name, uint32_t number) const {
    const auto found = files_.find(name);
    return found != files_.end() && found->second == number;
  }

 private:
  Result<uint32_t> AddTensor(uint32_t number, const FoundLeaf& leaf) {
    const auto [tied, fresh] =
        places_.try_emplace(PlaceOf(number, leaf), leaf.leaf.name);
    if (!fresh) return catalog_.AddAlias(leaf.leaf.name, tied->second);
    TC_ASSIGN_OR_RETURN(
        const uint32_t entry,
        catalog_.AddTensor(leaf.leaf.name, leaf.dtype, leaf.tensor->box.sizes));
    Placement placement = *leaf.tensor;
    placement.file = number;
    TC_RETURN_IF_ERROR(catalog_.AddPlacement(entry, placement));
    return entry;
  }

  CatalogBuilder catalog_;
  std::map<std::string, uint32_t> files_;  // by leaf
  std::map<Place, std::string> places_;
  std::vector<StateContainer> containers_;
  std::map<std::string, size_t> by_path_;
};

// Which files count, and the index that says so.
struct Chosen {
  std::vector<std::string> files;
  std::string index_name;
  std::optional<HfIndex> index;
};

// By their index: all that it names, and nothing else.
Status ChooseIndexed(const Directory& directory,
                     std::span<const std::string> names, Chosen* out) {
  const std::string path = directory.Join(out->index_name);
  TC_ASSIGN_OR_RETURN(const std::string text,
                      directory.ReadFile(out->index_name, kMaxIndexBytes));
  Result<HfIndex> parsed = ParseHfIndex(AsBytes(text), kSuffix);
  if (!parsed.ok()) return parsed.status().WithFile(path);
  out->index = std::move(parsed).value();
  std::set<std::string> indexed;
  for (const auto& each : out->index->weight_map) indexed.insert(each.second);
  for (const std::string& name : indexed) {
    if (std::binary_search(names.begin(), names.end(), name)) continue;
    return Incomplete("is named by " + out->index_name + " and is missing")
        .WithFile(directory.Join(name));
  }
  for (const std::string& name : out->files) {
    if (indexed.contains(name)) continue;
    return Conflict("stands beside " + out->index_name +
                    ", which does not name it; move what you do not mean "
                    "elsewhere")
        .WithFile(directory.Join(name));
  }
  out->files.assign(indexed.begin(), indexed.end());
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
  for (const std::string_view stem : kStems) {
    std::string index = std::string(stem) + std::string(kIndexEnd);
    if (!std::binary_search(names.begin(), names.end(), index)) continue;
    out.index_name = std::move(index);
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

bool HasTorchWeights(std::span<const std::string> names) {
  return std::any_of(names.begin(), names.end(), IsWeights);
}

Result<ForeignCatalog> ReadTorchFiles(const Directory& directory,
                                      std::span<const std::string> names,
                                      bool is_file) {
  Result<Chosen> chosen = Choose(directory, names, is_file);
  if (!chosen.ok()) return chosen.status().WithFile(directory.path());
  const std::vector<std::string>& files = chosen->files;
  std::vector<FoundFile> found(files.size());
  Merger merger;
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
  out.archives = true;
  for (size_t i = 0; i < files.size(); ++i) {
    ManifestFile file;
    file.name = files[i];
    file.bytes = found[i].info.bytes;
    file.container = Container::kRaw;
    Status added = merger.Add(static_cast<uint32_t>(i), file, found[i]);
    if (!added.ok()) return std::move(added).WithFile(directory.path());
    out.files.push_back(std::move(file));
    out.infos.push_back(found[i].info);
  }
  if (chosen->index) {
    for (const auto& [name, file] : chosen->index->weight_map) {
      const auto at = std::lower_bound(files.begin(), files.end(), file);
      if (merger.Has(name, static_cast<uint32_t>(at - files.begin()))) continue;
      return Incomplete("the index says it is in " + file +
                        ", which does not hold it")
          .WithTensor(name)
          .WithFile(directory.Join(chosen->index_name));
    }
  }
  out.identity = IdentityOf(out.files, out.infos);
  TC_RETURN_IF_ERROR(merger.Finish(directory.path(), &out));
  return out;
}

}  // namespace torch_ckpt
