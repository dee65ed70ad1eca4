#include "format/dcp_metadata.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "format/json.h"
#include "format/names.h"
#include "format/pickle.h"
#include "format/torch_tensor.h"

namespace torch_ckpt {
namespace {

using Values = std::span<const PickleValue>;

Status Lacks(const char* what) {
  return Corrupt(std::string("the metadata has no ") + what);
}

// An attribute of an object of that name.
Result<const PickleValue*> Attribute(const PickleValue& value, PickleName name,
                                     const char* attribute) {
  if (!value.Is(PickleKind::kObject, name)) {
    return Corrupt(std::string("the metadata has something else where ") +
                   attribute + " belongs");
  }
  const PickleValue* found = FindAttribute(value.object(), attribute);
  if (!found) return Lacks(attribute);
  return found;
}

// What the metadata says of one name, and which places it has found for it: a
// tensor has chunks, an object is one piece.
class Chunks {
 public:
  Chunks(std::string_view name, uint32_t entry, Values values, int64_t packed)
      : name_(name),
        entry_(entry),
        values_(values),
        packed_(packed),
        found_(values.size(), false) {}

  std::string_view name() const { return name_; }
  uint32_t entry() const { return entry_; }

  // The box of the chunk at `offsets`, which is expected at position `hint`
  // and is marked as found.
  Result<Box> Take(const Dims& offsets, size_t hint) {
    size_t at = hint;
    bool same = false;
    if (at < values_.size()) {
      TC_ASSIGN_OR_RETURN(const Dims there, OffsetsOf(at));
      same = there == offsets;
    }
    if (!same) {
      TC_ASSIGN_OR_RETURN(const size_t first, Search(offsets));
      at = sorted_[first].second;
    }
    if (found_[at]) {
      return Conflict("the metadata says twice where " + offsets.ToString() +
                      " is");
    }
    found_[at] = true;
    TC_ASSIGN_OR_RETURN(const Dims taken, SizesOf(at));
    if (taken.size() != offsets.size()) return Lacks("box of a chunk");
    return Box{Unpacked(offsets), Unpacked(taken)};
  }

  // Earlier versions of DCP list a chunk for each rank that has it, and a place
  // for one of them.
  Status CheckAllFound() {
    for (size_t at = 0; at < found_.size(); ++at) {
      if (found_[at]) continue;
      TC_ASSIGN_OR_RETURN(const Dims offsets, OffsetsOf(at));
      TC_ASSIGN_OR_RETURN(size_t same, Search(offsets));
      for (; same < sorted_.size() && sorted_[same].first == offsets; ++same) {
        if (found_[sorted_[same].second]) break;
      }
      if (same == sorted_.size() || !(sorted_[same].first == offsets)) {
        return Incomplete(
            "the metadata does not say which file has the chunk at " +
            offsets.ToString());
      }
      TC_ASSIGN_OR_RETURN(const Dims missing, SizesOf(at));
      TC_ASSIGN_OR_RETURN(const Dims found, SizesOf(sorted_[same].second));
      if (!(missing == found)) {
        return Conflict("the metadata has two chunks at " + offsets.ToString());
      }
      found_[at] = true;  // so that whole runs of them are found at once
    }
    return {};
  }

 private:
  Result<Dims> OffsetsOf(size_t at) const {
    TC_ASSIGN_OR_RETURN(
        const PickleValue* offsets,
        Attribute(values_[at], PickleName::kChunkStorageMetadata, "offsets"));
    return ReadSize(*offsets);
  }
  Result<Dims> SizesOf(size_t at) const {
    TC_ASSIGN_OR_RETURN(
        const PickleValue* sizes,
        Attribute(values_[at], PickleName::kChunkStorageMetadata, "sizes"));
    return ReadSize(*sizes);
  }
  // torch counts packed elements as one.
  Dims Unpacked(Dims dims) const {
    if (packed_ > 1 && !dims.empty()) dims[dims.size() - 1] *= packed_;
    return dims;
  }
  static bool Before(const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }
  // The first one in sorted_ with these offsets.
  Result<size_t> Search(const Dims& offsets) {
    if (sorted_.empty()) {
      for (size_t i = 0; i < values_.size(); ++i) {
        TC_ASSIGN_OR_RETURN(Dims each, OffsetsOf(i));
        sorted_.emplace_back(std::move(each), i);
      }
      std::sort(sorted_.begin(), sorted_.end(),
                [](auto& a, auto& b) { return Before(a.first, b.first); });
    }
    const auto at = std::lower_bound(
        sorted_.begin(), sorted_.end(), offsets,
        [](const auto& a, const Dims& b) { return Before(a.first, b); });
    if (at == sorted_.end() || !(at->first == offsets)) {
      return Corrupt("the metadata knows no chunk at " + offsets.ToString());
    }
    return static_cast<size_t>(at - sorted_.begin());
  }

  std::string_view name_;
  uint32_t entry_;
  Values values_;
  int64_t packed_;
  std::vector<bool> found_;
  std::vector<std::pair<Dims, size_t>> sorted_;
};

constexpr size_t kMostParts = 100;  // of a path
// Of all paths together, for each byte of the pickle: in it they share texts.
constexpr size_t kPathBytesPerByte = 4;

// A state-dict path as the catalog has it; empty where it is just (name,), and
// where DCP says something else than names and numbers.
Result<std::string> PathJson(const PickleValue& value, std::string_view name) {
  const std::string none;
  if (!value.Is(PickleKind::kTuple) && !value.Is(PickleKind::kList)) {
    return none;
  }
  const Values parts = value.items();
  if (parts.size() == 1 && parts[0].Is(PickleKind::kString) &&
      parts[0].text() == name) {
    return none;
  }
  size_t bytes = 0;
  for (const PickleValue& part : parts) {
    if (part.Is(PickleKind::kString)) bytes += part.text().size();
  }
  if (parts.size() > kMostParts || bytes > kMaxNameBytes) {
    return Unsupported("has a path of more than 100 parts or 64 KiB");
  }
  std::string out;
  for (const PickleValue& part : parts) {
    out += out.empty() ? '[' : ',';
    if (part.Is(PickleKind::kInt)) {
      out += std::to_string(part.integer());
    } else if (part.Is(PickleKind::kString) && IsUtf8(part.text())) {
      AppendJsonString(&out, part.text());
    } else {
      return none;
    }
  }
  return out.empty() ? none : out + "]";
}

class MetadataReader {
 public:
  MetadataReader(size_t pickle_bytes, std::string_view apart)
      : pickle_bytes_(pickle_bytes), apart_(apart) {}

  Result<DcpMetadata> Read(const PickleValue& root) {
    TC_ASSIGN_OR_RETURN(
        const PickleValue* state,
        Attribute(root, PickleName::kMetadata, "state_dict_metadata"));
    TC_ASSIGN_OR_RETURN(const PickleValue* storage,
                        Attribute(root, PickleName::kMetadata, "storage_data"));
    if (!state->Is(PickleKind::kDict) || !storage->Is(PickleKind::kDict)) {
      return Corrupt("the metadata is of another storage than .distcp files");
    }
    if (const PickleValue* paths = FindAttribute(root.object(), "planner_data");
        paths && paths->Is(PickleKind::kDict)) {
      TC_RETURN_IF_ERROR(ReadPaths(paths->items()));
    }
    const Values names = state->items();
    for (size_t i = 0; i + 1 < names.size(); i += 2) {
      Status added = AddEntry(names[i], names[i + 1]);
      if (!added.ok()) return WithName(std::move(added), names[i]);
    }
    const Values places = storage->items();
    for (size_t i = 0; i + 1 < places.size(); i += 2) {
      TC_RETURN_IF_ERROR(AddPlace(places[i], places[i + 1]));
    }
    return Finish();
  }

 private:
  static Status WithName(Status status, const PickleValue& name) {
    if (!name.Is(PickleKind::kString)) return status;
    return std::move(status).WithTensor(std::string(name.text()));
  }

  Status ReadPaths(Values paths) {
    for (size_t i = 0; i + 1 < paths.size(); i += 2) {
      if (!paths[i].Is(PickleKind::kString)) continue;
      Result<std::string> path = PathJson(paths[i + 1], paths[i].text());
      if (!path.ok()) return WithName(path.status(), paths[i]);
      std::string json = std::move(path).value();
      if (json.empty()) continue;
      path_bytes_ += json.size();
      if (path_bytes_ / kPathBytesPerByte > pickle_bytes_) {
        return Exhausted("the paths in the metadata are longer than all of it");
      }
      paths_[paths[i].text()] = std::move(json);
    }
    return {};
  }

  Status AddEntry(const PickleValue& key, const PickleValue& value) {
    if (!key.Is(PickleKind::kString)) return Lacks("name of a tensor");
    const std::string name(key.text());
    const Status possible = CheckTensorName(name);
    if (!possible.ok()) return Corrupt(possible.message());
    if (value.Is(PickleKind::kObject, PickleName::kBytesStorageMetadata)) {
      objects_.insert(key.text());
      return {};
    }
    TC_ASSIGN_OR_RETURN(
        const PickleValue* properties,
        Attribute(value, PickleName::kTensorStorageMetadata, "properties"));
    if (IsOfOtherDtype(*properties)) {
      // An object, which says what it is when it is read.
      objects_.insert(key.text());
      others_.insert(key.text());
      return {};
    }
    TC_ASSIGN_OR_RETURN(
        const PickleValue* size,
        Attribute(value, PickleName::kTensorStorageMetadata, "size"));
    TC_ASSIGN_OR_RETURN(
        const PickleValue* chunks,
        Attribute(value, PickleName::kTensorStorageMetadata, "chunks"));
    TC_ASSIGN_OR_RETURN(const Dtype dtype, DtypeOf(*properties));
    TC_ASSIGN_OR_RETURN(Dims shape, ReadSize(*size));
    const int64_t packed = DtypeUnit(dtype).elements;
    if (packed > 1 && !shape.empty()) shape[shape.size() - 1] *= packed;
    TC_RETURN_IF_ERROR(ByteSize(dtype, shape).status());
    if (!chunks->Is(PickleKind::kList)) return Lacks("chunks");
    // Before anything is kept of chunks: a pickle may say one list many times.
    chunks_said_ += chunks->items().size();
    if (chunks_said_ > pickle_bytes_) {
      return Exhausted("the metadata says more chunks than it has bytes");
    }
    TC_ASSIGN_OR_RETURN(const uint32_t entry,
                        out_.catalog.AddTensor(name, dtype, shape));
    SetPath(entry, key.text());
    chunks_.emplace_back(key.text(), entry, chunks->items(), packed);
    return {};
  }

  // TensorProperties are a tuple of their own making, the dtype first. Null
  // where it is not.
  static const PickleValue* FindDtype(const PickleValue& properties) {
    if (!properties.Is(PickleKind::kObject, PickleName::kTensorProperties)) {
      return nullptr;
    }
    const PickleValue& state = properties.object().state;
    if (!state.Is(PickleKind::kTuple) || state.items().empty()) return nullptr;
    return &state.items()[0];
  }
  static bool IsOfOtherDtype(const PickleValue& properties) {
    const PickleValue* dtype = FindDtype(properties);
    return dtype && dtype->Is(PickleKind::kName, PickleName::kOtherDtype);
  }
  static Result<Dtype> DtypeOf(const PickleValue& properties) {
    const PickleValue* dtype = FindDtype(properties);
    if (!dtype || !dtype->Is(PickleKind::kName, PickleName::kDtype)) {
      return Lacks("dtype");
    }
    return dtype->dtype();
  }

  Status AddPlace(const PickleValue& key, const PickleValue& value) {
    TC_ASSIGN_OR_RETURN(const PickleValue* fqn,
                        Attribute(key, PickleName::kMetadataIndex, "fqn"));
    Status added = AddPlaceOf(*fqn, key, value);
    if (!added.ok()) return WithName(std::move(added), *fqn);
    return {};
  }

  Status AddPlaceOf(const PickleValue& fqn, const PickleValue& key,
                    const PickleValue& value) {
    if (!fqn.Is(PickleKind::kString)) return Lacks("name of a chunk");
    TC_ASSIGN_OR_RETURN(const Placement placement, PlaceOf(value));
    const int64_t known = out_.catalog.Find(fqn.text());
    if (known < 0) return AddObject(fqn.text(), placement);
    // The first chunk of such a tensor stands for all.
    if (others_.contains(fqn.text())) return {};
    if (static_cast<size_t>(known) >= chunks_.size()) {
      return Conflict("the metadata says twice where it is");
    }
    Chunks* chunks = &chunks_[static_cast<size_t>(known)];
    TC_ASSIGN_OR_RETURN(const PickleValue* offset,
                        Attribute(key, PickleName::kMetadataIndex, "offset"));
    TC_ASSIGN_OR_RETURN(const Dims offsets, ReadSize(*offset));
    const PickleValue* index = FindAttribute(key.object(), "index");
    const bool hinted =
        index && index->Is(PickleKind::kInt) && index->integer() >= 0;
    Placement chunk = placement;
    TC_ASSIGN_OR_RETURN(
        chunk.box,
        chunks->Take(offsets, hinted ? static_cast<size_t>(index->integer())
                                     : std::numeric_limits<size_t>::max()));
    // Whatever holds a box, it is no smaller: nothing larger is ever read of
    // it.
    const CatalogBuilder::Entry& entry = out_.catalog.entry(chunks->entry());
    const Result<uint64_t> bytes = ByteSize(entry.dtype, chunk.box.sizes);
    if (!bytes.ok() || *bytes > chunk.bytes) {
      return Corrupt("the chunk " + chunk.box.ToString() +
                     " does not fit into " + std::to_string(chunk.bytes) +
                     " bytes");
    }
    return out_.catalog.AddPlacement(chunks->entry(), chunk);
  }

  Status AddObject(std::string_view name, const Placement& placement) {
    if (!objects_.contains(name)) {
      return Corrupt("the metadata says where it is, and not what");
    }
    if (name == apart_ && !out_.apart) {
      out_.apart = TorchArchivePlace{placement.file,
                                     {placement.offset, placement.bytes}};
      return {};
    }
    TC_ASSIGN_OR_RETURN(
        const uint32_t entry,
        out_.catalog.AddObject(
            std::string(name), placement.file,
            ArchivedObject{{placement.offset, placement.bytes}}));
    SetPath(entry, name);
    return {};
  }

  // What a _StorageInfo says, as a placement without a box.
  Result<Placement> PlaceOf(const PickleValue& info) {
    constexpr auto kInfo = PickleName::kStorageInfo;
    TC_ASSIGN_OR_RETURN(const PickleValue* path,
                        Attribute(info, kInfo, "relative_path"));
    TC_ASSIGN_OR_RETURN(const PickleValue* offset,
                        Attribute(info, kInfo, "offset"));
    TC_ASSIGN_OR_RETURN(const PickleValue* length,
                        Attribute(info, kInfo, "length"));
    const PickleValue* transforms =
        FindAttribute(info.object(), "transform_descriptors");
    if (transforms && !transforms->Is(PickleKind::kNone) &&
        !(transforms->Is(PickleKind::kList) && transforms->items().empty())) {
      return Unsupported("was saved through an extension, such as compression");
    }
    if (!path->Is(PickleKind::kString) || !offset->Is(PickleKind::kInt) ||
        !length->Is(PickleKind::kInt) || offset->integer() < 0 ||
        length->integer() < 0) {
      return Lacks("place of a chunk");
    }
    Placement out;
    out.kind = PlacementKind::kArchive;
    TC_ASSIGN_OR_RETURN(out.file, FileOf(path->text()));
    out.offset = static_cast<uint64_t>(offset->integer());
    out.bytes = static_cast<uint64_t>(length->integer());
    DcpFile& file = out_.files[out.file];
    file.bytes = std::max(file.bytes, out.offset + out.bytes);
    return out;
  }

  Result<uint32_t> FileOf(std::string_view name) {
    // Neighbours are in one file, and the pickle has its name once.
    if (last_file_ < out_.files.size() && out_.files[last_file_].name == name) {
      return last_file_;
    }
    const auto next = static_cast<uint32_t>(out_.files.size());
    const auto [at, fresh] = files_.try_emplace(name, next);
    if (fresh) {
      TC_RETURN_IF_ERROR(CheckFileName(name));
      out_.files.push_back({std::string(name), 0});
    }
    last_file_ = at->second;
    return last_file_;
  }

  void SetPath(uint32_t entry, std::string_view name) {
    const auto path = paths_.find(name);
    if (path != paths_.end()) out_.catalog.SetPath(entry, path->second);
  }

  Result<DcpMetadata> Finish() {
    for (Chunks& chunks : chunks_) {
      Status found = chunks.CheckAllFound();
      if (!found.ok()) {
        return std::move(found).WithTensor(std::string(chunks.name()));
      }
    }
    for (const std::string_view name : objects_) {
      if (name == apart_ && out_.apart) continue;
      const int64_t entry = out_.catalog.Find(name);
      if (entry >= static_cast<int64_t>(chunks_.size())) continue;
      if (entry >= 0) {
        return Corrupt("stands twice in the metadata")
            .WithTensor(std::string(name));
      }
      return Incomplete("the metadata does not say which file has it")
          .WithTensor(std::string(name));
    }
    return std::move(out_);
  }

  DcpMetadata out_;
  std::vector<Chunks> chunks_;  // of the catalog's first entries
  // Views of the pickle's text.
  std::set<std::string_view> objects_;
  std::set<std::string_view> others_;  // of these, tensors of no dtype of ours
  std::map<std::string_view, std::string> paths_;
  std::map<std::string_view, uint32_t> files_;
  uint32_t last_file_ = 0;
  const size_t pickle_bytes_;
  const std::string_view apart_;
  size_t path_bytes_ = 0;
  size_t chunks_said_ = 0;
};

}  // namespace

Result<DcpMetadata> ParseDcpMetadata(ByteSpan pickle, std::string_view apart) {
  TC_ASSIGN_OR_RETURN(const Pickle parsed,
                      Pickle::Parse(pickle, UnknownNames::kRefuse));
  return MetadataReader(pickle.size(), apart).Read(parsed.root());
}

}  // namespace torch_ckpt
