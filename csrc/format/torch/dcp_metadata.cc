#include "format/torch/dcp_metadata.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "format/json.h"
#include "format/names.h"
#include "format/torch/dcp_chunks.h"
#include "format/torch/pickle.h"
#include "format/torch/tensor.h"
#include "format/torch/unread.h"

namespace torch_ckpt {
namespace {

constexpr size_t kNowhere = std::numeric_limits<size_t>::max();

Status Lacks(const char* what) {
  return Corrupt(std::string("the metadata has no ") + what);
}

// Finds attributes of the objects of one class, of which there are millions.
// Most are pickled alike: the same keys in the same order, said once and
// recalled in each. Then each attribute is looked for once.
template <size_t N>
class Attributes {
 public:
  Attributes(PickleName name, std::array<const char*, N> attributes)
      : name_(name), attributes_(attributes) {}

  // `value` is the object that is meant from now on.
  Status Look(const PickleValue& value, Budget* budget) {
    if (!value.Is(PickleKind::kObject, name_)) {
      return Corrupt(std::string("the metadata has something else where ") +
                     attributes_[0] + " belongs");
    }
    const PickleValue& state = value.object().state;
    const PickleValues items =
        state.Is(PickleKind::kDict) ? state.items() : PickleValues{};
    if (HasSameKeys(items)) {
      for (size_t i = 0; i < N; ++i) {
        found_[i] = at_[i] == kNowhere ? nullptr : &items[at_[i]];
      }
      return {};
    }
    if (!budget->Step(1 + items.size())) return budget->Over();
    for (size_t i = 0; i < N; ++i) {
      found_[i] = FindAttribute(value.object(), attributes_[i]);
    }
    RememberKeys(items);
    return {};
  }
  // By its position in the list of them. Null where there is none.
  const PickleValue* Find(size_t attribute) const { return found_[attribute]; }
  Result<const PickleValue*> Get(size_t attribute) const {
    if (!found_[attribute]) return Lacks(attributes_[attribute]);
    return found_[attribute];
  }

 private:
  // Objects that have more are rare, and each is looked through.
  static constexpr size_t kMostKeys = 10;

  bool HasSameKeys(PickleValues items) const {
    if (keys_.empty() || items.size() != 2 * keys_.size()) return false;
    for (size_t i = 0; i < keys_.size(); ++i) {
      if (!items[2 * i].IsSame(keys_[i])) return false;
    }
    return true;
  }
  void RememberKeys(PickleValues items) {
    keys_.clear();
    if (items.empty() || items.size() > 2 * kMostKeys) return;
    for (size_t i = 0; i < items.size(); i += 2) keys_.push_back(items[i]);
    for (size_t i = 0; i < N; ++i) {
      at_[i] =
          found_[i] ? static_cast<size_t>(found_[i] - items.data()) : kNowhere;
    }
  }

  const PickleName name_;
  const std::array<const char*, N> attributes_;
  std::array<const PickleValue*, N> found_{};
  std::vector<PickleValue> keys_;
  std::array<size_t, N> at_{};  // in items with these keys
};

constexpr size_t kMostPathParts = 100;  // of a path
// What is kept beside the text of one, here and in the catalog.
constexpr size_t kBytesOfPath = 128;

// A state-dict path as the catalog has it; empty where it is just (name,), and
// where DCP says something else than names and numbers.
Result<std::string> PathJson(const PickleValue& value, std::string_view name,
                             Budget* budget) {
  const std::string none;
  if (!value.Is(PickleKind::kTuple) && !value.Is(PickleKind::kList)) {
    return none;
  }
  const PickleValues parts = value.items();
  if (parts.size() == 1 && parts[0].Is(PickleKind::kString) &&
      parts[0].text() == name) {
    return none;
  }
  size_t bytes = 0;
  for (size_t i = 0; i < parts.size() && i < kMostPathParts; ++i) {
    if (parts[i].Is(PickleKind::kString)) bytes += parts[i].text().size();
  }
  if (parts.size() > kMostPathParts || bytes > kMaxNameBytes) {
    return Unsupported("has a path of more than 100 parts or 64 KiB");
  }
  // Before it is known whether it is one: many may share the parts.
  if (!budget->Step(parts.size()) || !budget->Touch(bytes)) {
    return budget->Over();
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
  MetadataReader(Budget* budget, std::string_view apart)
      : budget_(*budget), apart_(apart) {}

  Result<DcpMetadata> Read(const PickleValue& root) {
    enum : size_t { kState, kStorage, kPlanner };
    Attributes<3> parts(
        PickleName::kMetadata,
        {"state_dict_metadata", "storage_data", "planner_data"});
    TC_RETURN_IF_ERROR(parts.Look(root, &budget_));
    TC_ASSIGN_OR_RETURN(const PickleValue* state, parts.Get(kState));
    TC_ASSIGN_OR_RETURN(const PickleValue* storage, parts.Get(kStorage));
    if (!state->Is(PickleKind::kDict) || !storage->Is(PickleKind::kDict)) {
      return Corrupt("the metadata is of another storage than .distcp files");
    }
    if (const PickleValue* paths = parts.Find(kPlanner);
        paths && paths->Is(PickleKind::kDict)) {
      TC_RETURN_IF_ERROR(ReadPaths(paths->items()));
    }
    const PickleValues names = state->items();
    for (size_t i = 0; i + 1 < names.size(); i += 2) {
      Status added = AddEntry(names[i], names[i + 1]);
      if (!added.ok()) return WithName(std::move(added), names[i]);
    }
    const PickleValues places = storage->items();
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

  Status ReadPaths(PickleValues paths) {
    for (size_t i = 0; i + 1 < paths.size(); i += 2) {
      if (!paths[i].Is(PickleKind::kString)) continue;
      if (!budget_.Touch(paths[i].text().size())) return budget_.Over();
      Result<std::string> path =
          PathJson(paths[i + 1], paths[i].text(), &budget_);
      if (!path.ok()) return WithName(path.status(), paths[i]);
      std::string json = std::move(path).value();
      if (json.empty()) continue;
      if (!budget_.Keep(kBytesOfPath + json.size())) return budget_.Over();
      paths_[paths[i].text()] = std::move(json);
    }
    return {};
  }

  Status AddEntry(const PickleValue& key, const PickleValue& value) {
    if (!key.Is(PickleKind::kString)) return Lacks("name of a tensor");
    if (!budget_.Touch(key.text().size())) return budget_.Over();
    const std::string name(key.text());
    const Status possible = CheckTensorName(name);
    if (!possible.ok()) return Corrupt(possible.message());
    if (value.Is(PickleKind::kObject, PickleName::kBytesStorageMetadata)) {
      objects_.insert(key.text());
      return {};
    }
    TC_RETURN_IF_ERROR(tensor_.Look(value, &budget_));
    TC_ASSIGN_OR_RETURN(const PickleValue* properties,
                        tensor_.Get(kProperties));
    if (IsOfOtherDtype(*properties)) {
      // An object to the catalog, which has no such dtype.
      UnreadTensor& unread = out_.unread[name];
      unread.dtype = NamedDtype(*FindDtype(*properties));
      unread.reason = "is of the dtype " + unread.dtype +
                      ", which safetensors has no name for";
      if (const PickleValue* size = tensor_.Find(kShape)) {
        Result<Dims> shape = ReadSize(*size);
        if (shape.ok()) unread.shape = std::move(shape).value();
      }
      objects_.insert(key.text());
      others_.insert(key.text());
      return {};
    }
    TC_ASSIGN_OR_RETURN(const PickleValue* size, tensor_.Get(kShape));
    TC_ASSIGN_OR_RETURN(const PickleValue* chunks, tensor_.Get(kChunks));
    TC_ASSIGN_OR_RETURN(const Dtype dtype, DtypeOf(*properties));
    TC_ASSIGN_OR_RETURN(Dims shape, ReadSize(*size));
    const int64_t packed = DtypeUnit(dtype).elements;
    if (packed > 1 && !shape.empty()) shape[shape.size() - 1] *= packed;
    TC_RETURN_IF_ERROR(ByteSize(dtype, shape).status());
    if (!chunks->Is(PickleKind::kList)) return Lacks("chunks");
    // A pickle may say one list many times.
    if (!budget_.Step(chunks->items().size()) ||
        !budget_.Keep(chunks->items().size() *
                      DcpChunks::BytesOfEach(shape.size()))) {
      return budget_.Over();
    }
    TC_ASSIGN_OR_RETURN(const uint32_t entry,
                        out_.catalog.AddTensor(name, dtype, shape));
    SetPath(entry, key.text());
    DcpChunks& read =
        chunks_.emplace_back(shape.size(), packed, chunks->items().size());
    for (const PickleValue& chunk : chunks->items()) {
      TC_RETURN_IF_ERROR(chunk_.Look(chunk, &budget_));
      TC_ASSIGN_OR_RETURN(const PickleValue* offsets, chunk_.Get(kOffsets));
      TC_ASSIGN_OR_RETURN(const PickleValue* sizes, chunk_.Get(kSizes));
      TC_ASSIGN_OR_RETURN(const Dims begin, ReadSize(*offsets));
      TC_ASSIGN_OR_RETURN(const Dims taken, ReadSize(*sizes));
      TC_RETURN_IF_ERROR(read.Add(begin, taken));
    }
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
    TC_RETURN_IF_ERROR(index_.Look(key, &budget_));
    TC_ASSIGN_OR_RETURN(const PickleValue* fqn, index_.Get(kFqn));
    Status added = AddPlaceOf(*fqn, value);
    if (!added.ok()) return WithName(std::move(added), *fqn);
    return {};
  }

  // Of what index_ looks at.
  Status AddPlaceOf(const PickleValue& fqn, const PickleValue& value) {
    if (!fqn.Is(PickleKind::kString)) return Lacks("name of a chunk");
    // Of names and files that are the next ones too: each is compared.
    if (!budget_.Touch(fqn.text().size())) return budget_.Over();
    Placement place;
    TC_RETURN_IF_ERROR(ReadPlace(value, &place));
    const int64_t known = Find(fqn.text());
    if (known < 0) return AddObject(fqn.text(), place);
    // The first chunk of such a tensor stands for all.
    if (others_.contains(fqn.text())) {
      if (!budget_.Keep(sizeof(TorchArchivePlace))) return budget_.Over();
      out_.more.push_back(
          {place.file, ByteRange::Of(place.offset, place.bytes)});
      return {};
    }
    if (static_cast<size_t>(known) >= chunks_.size()) {
      return Conflict("the metadata says twice where it is");
    }
    const auto entry = static_cast<uint32_t>(known);
    TC_ASSIGN_OR_RETURN(const PickleValue* offset, index_.Get(kOffsetsOfIndex));
    TC_ASSIGN_OR_RETURN(const Dims offsets, ReadSize(*offset));
    const PickleValue* index = index_.Find(kHint);
    const bool hinted =
        index && index->Is(PickleKind::kInt) && index->integer() >= 0;
    const size_t hint =
        hinted ? static_cast<size_t>(index->integer()) : kNowhere;
    TC_RETURN_IF_ERROR(chunks_[entry].Take(offsets, hint, &place.box));
    // Whatever holds a box, it is no smaller. Of a subclass stock stores what
    // pickle makes of it, as codes that take fewer bytes.
    const Result<uint64_t> bytes =
        ByteSize(EntryOf(entry).dtype, place.box.sizes);
    if (!bytes.ok() || *bytes > place.bytes) {
      const CatalogBuilder::Entry& tensor = EntryOf(entry);
      out_.unread.try_emplace(
          tensor.name,
          UnreadTensor{DtypeName(tensor.dtype), tensor.shape,
                       "is stored as something else than its elements: the "
                       "chunk " +
                           place.box.ToString() + " has " +
                           std::to_string(place.bytes) + " bytes"});
    }
    return out_.catalog.AddPlacement(entry, place);
  }

  // As the catalog has it. Places mostly come rank by rank, in the order of the
  // tensors: the next one is tried first.
  int64_t Find(std::string_view name) {
    const size_t next = last_found_ + 1 < chunks_.size() ? last_found_ + 1 : 0;
    if (next < chunks_.size() && EntryOf(next).name == name) {
      last_found_ = next;
      return static_cast<int64_t>(next);
    }
    const int64_t known = out_.catalog.Find(name);
    if (known >= 0) last_found_ = static_cast<size_t>(known);
    return known;
  }
  // Of a position in chunks_.
  const CatalogBuilder::Entry& EntryOf(size_t at) const {
    return out_.catalog.entry(static_cast<uint32_t>(at));
  }

  Status AddObject(std::string_view name, const Placement& placement) {
    if (!objects_.contains(name)) {
      return Corrupt("the metadata says where it is, and not what");
    }
    if (name == apart_ && !out_.apart) {
      out_.apart = TorchArchivePlace{
          placement.file, ByteRange::Of(placement.offset, placement.bytes)};
      return {};
    }
    TC_ASSIGN_OR_RETURN(
        const uint32_t entry,
        out_.catalog.AddObject(
            std::string(name), placement.file,
            ArchivedObject{ByteRange::Of(placement.offset, placement.bytes)}));
    SetPath(entry, name);
    return {};
  }

  // Sets all but the box to what a _StorageInfo says.
  Status ReadPlace(const PickleValue& info, Placement* out) {
    TC_RETURN_IF_ERROR(place_.Look(info, &budget_));
    TC_ASSIGN_OR_RETURN(const PickleValue* path, place_.Get(kPath));
    TC_ASSIGN_OR_RETURN(const PickleValue* offset, place_.Get(kOffset));
    TC_ASSIGN_OR_RETURN(const PickleValue* length, place_.Get(kLength));
    const PickleValue* transforms = place_.Find(kTransforms);
    if (transforms && !transforms->Is(PickleKind::kNone) &&
        !(transforms->Is(PickleKind::kList) && transforms->items().empty())) {
      return Unsupported("was saved through an extension, such as compression");
    }
    if (!path->Is(PickleKind::kString) || !offset->Is(PickleKind::kInt) ||
        !length->Is(PickleKind::kInt) || offset->integer() < 0 ||
        length->integer() < 0) {
      return Lacks("place of a chunk");
    }
    if (!budget_.Touch(path->text().size())) return budget_.Over();
    out->kind = PlacementKind::kArchive;
    TC_ASSIGN_OR_RETURN(out->file, FileOf(path->text()));
    out->offset = static_cast<uint64_t>(offset->integer());
    out->bytes = static_cast<uint64_t>(length->integer());
    DcpFile& file = out_.files[out->file];
    file.bytes = std::max(file.bytes, out->offset + out->bytes);
    return {};
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
    for (size_t at = 0; at < chunks_.size(); ++at) {
      Status found = chunks_[at].CheckAllFound();
      if (!found.ok()) return std::move(found).WithTensor(EntryOf(at).name);
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

  enum : size_t { kProperties, kShape, kChunks };
  Attributes<3> tensor_{PickleName::kTensorStorageMetadata,
                        {"properties", "size", "chunks"}};
  enum : size_t { kOffsets, kSizes };
  Attributes<2> chunk_{PickleName::kChunkStorageMetadata, {"offsets", "sizes"}};
  enum : size_t { kFqn, kOffsetsOfIndex, kHint };
  Attributes<3> index_{PickleName::kMetadataIndex, {"fqn", "offset", "index"}};
  enum : size_t { kPath, kOffset, kLength, kTransforms };
  Attributes<4> place_{
      PickleName::kStorageInfo,
      {"relative_path", "offset", "length", "transform_descriptors"}};
  DcpMetadata out_;
  std::vector<DcpChunks> chunks_;  // of the catalog's first entries
  // Views of the pickle's text.
  std::set<std::string_view> objects_;
  std::set<std::string_view> others_;  // of these, tensors of no dtype of ours
  std::map<std::string_view, std::string> paths_;
  std::map<std::string_view, uint32_t> files_;
  uint32_t last_file_ = 0;
  size_t last_found_ = 0;
  Budget& budget_;
  const std::string_view apart_;
};

}  // namespace

Result<DcpMetadata> ParseDcpMetadata(ByteSpan pickle, Budget* budget,
                                     std::string_view apart) {
  TC_ASSIGN_OR_RETURN(const Pickle parsed,
                      Pickle::Parse(pickle, UnknownNames::kRefuse));
  return MetadataReader(budget, apart).Read(parsed.root());
}

}  // namespace torch_ckpt
