#include "format/safetensors/sharding_info.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "format/json.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kOffsetsKey = "saved_offsets";
constexpr std::string_view kPeekPrefix =
    "{\"__metadata__\":{\"torch_ckpt.file_id\":\"";

// Finds the tensors of a file by name. Both metadata keys list them in the
// order of the header when we wrote the file, so the next one is tried first;
// the sorted list is made only when that fails.
class TensorFinder {
 public:
  explicit TensorFinder(const std::vector<SafetensorsEntry>& tensors)
      : tensors_(tensors) {}

  // -1 when there is none.
  int64_t Find(std::string_view name) {
    if (next_ < tensors_.size() && tensors_[next_].name == name)
      return static_cast<int64_t>(next_++);
    if (sorted_.size() != tensors_.size()) {
      sorted_.resize(tensors_.size());
      std::iota(sorted_.begin(), sorted_.end(), size_t{0});
      std::sort(sorted_.begin(), sorted_.end(), [this](size_t a, size_t b) {
        return tensors_[a].name < tensors_[b].name;
      });
    }
    const auto at = std::lower_bound(
        sorted_.begin(), sorted_.end(), name,
        [this](size_t i, std::string_view n) { return tensors_[i].name < n; });
    if (at == sorted_.end() || tensors_[*at].name != name) return -1;
    next_ = *at + 1;
    return static_cast<int64_t>(*at);
  }

 private:
  const std::vector<SafetensorsEntry>& tensors_;
  std::vector<size_t> sorted_;
  size_t next_ = 0;
};

// Of an object whose keys are names of tensors.
class TensorsHandler : public JsonHandler {
 protected:
  explicit TensorsHandler(const std::vector<SafetensorsEntry>& tensors)
      : tensors_(tensors), finder_(tensors) {}

  bool OnTensor(std::string_view name) {
    tensor_ = finder_.Find(name);
    if (tensor_ >= 0) return true;
    return Fail(Corrupt("sharding info names a tensor that is not in the file")
                    .WithTensor(std::string(name)));
  }
  const SafetensorsEntry& Tensor() const { return tensors_[Number()]; }
  // REQUIRES: a tensor was named.
  size_t Number() const { return static_cast<size_t>(tensor_); }
  bool HasTensor() const { return tensor_ >= 0; }

  Status Locate(Status status) const override {
    if (tensor_ < 0) return status;
    return std::move(status).WithTensor(Tensor().name);
  }

 private:
  const std::vector<SafetensorsEntry>& tensors_;
  TensorFinder finder_;
  int64_t tensor_ = -1;
};

// Both keys: {fqn: [int]} and, with one level more, {fqn: {"saved_offsets":
// [int]}}. Calls back nothing; leaves the lists in `values`, by tensor.
class DimsHandler final : public TensorsHandler {
 public:
  // Of tensors that have boxes in `packed` it takes other numbers of
  // dimensions.
  DimsHandler(const std::vector<SafetensorsEntry>& tensors, bool nested,
              const std::vector<std::vector<Box>>& packed,
              std::vector<std::optional<Dims>>* values)
      : TensorsHandler(tensors),
        nested_(nested),
        packed_(packed),
        values_(values) {}

  bool OnKey(std::string_view key) override {
    if (depth_ == 1) return OnTensor(key);
    if (key != kOffsetsKey) {
      return Fail(Unsupported("unknown key in the sharding info"));
    }
    return true;
  }
  bool OnBeginObject() override {
    if (in_array_ || depth_ == (nested_ ? 2 : 1))
      return Refuse("unexpected object");
    ++depth_;
    return true;
  }
  bool OnEndObject() override {
    --depth_;
    if (depth_ == 1 && !Value()) return Refuse("saved_offsets is missing");
    return true;
  }
  bool OnBeginArray() override {
    if (in_array_ || depth_ != (nested_ ? 2 : 1))
      return Refuse("unexpected array");
    in_array_ = true;
    Value() = Dims();
    return true;
  }
  bool OnEndArray() override {
    in_array_ = false;
    const bool packed = !packed_[Number()].empty();
    if (!packed && Value()->size() != Tensor().shape.size())
      return Refuse("the sharding info has another number of dimensions");
    return true;
  }
  bool OnUnsigned(uint64_t value) override {
    if (!in_array_) return Refuse("unexpected number");
    if (value > static_cast<uint64_t>(kMaxDimension))
      return Refuse("a number is larger than 2^48 - 1");
    if (Value()->full())
      return Refuse("the sharding info has another number of dimensions");
    Value()->push_back(static_cast<int64_t>(value));
    return true;
  }

 private:
  std::optional<Dims>& Value() { return (*values_)[Number()]; }

  const bool nested_;
  const std::vector<std::vector<Box>>& packed_;
  std::vector<std::optional<Dims>>* values_;
  int depth_ = 0;
  bool in_array_ = false;
};

// {fqn: [[int]]}. Leaves the boxes in `values`, by tensor.
class BoxesHandler final : public TensorsHandler {
 public:
  BoxesHandler(const std::vector<SafetensorsEntry>& tensors,
               std::vector<std::vector<Box>>* values)
      : TensorsHandler(tensors), values_(values) {}

  bool OnKey(std::string_view key) override { return OnTensor(key); }
  bool OnBeginObject() override {
    return !std::exchange(in_root_, true) || Refuse("unexpected object");
  }
  bool OnEndObject() override { return true; }
  bool OnBeginArray() override {
    if (arrays_ == 2 || !HasTensor()) return Refuse("unexpected array");
    ++arrays_;
    numbers_.clear();
    return true;
  }
  bool OnEndArray() override {
    if (--arrays_ == 0) {
      return !Boxes().empty() || Refuse("a packed tensor has no boxes");
    }
    const size_t dims = numbers_.size() / 2;
    if (numbers_.empty() || numbers_.size() % 2 != 0)
      return Refuse("a box has an odd number, or none");
    // Each has some: so that small text costs little memory.
    if (Boxes().size() == Tensor().end - Tensor().begin)
      return Refuse("a packed tensor has more boxes than bytes");
    Box box;
    for (size_t d = 0; d < dims; ++d) {
      box.offsets.push_back(numbers_[d]);
      box.sizes.push_back(numbers_[dims + d]);
    }
    Boxes().push_back(std::move(box));
    return true;
  }
  bool OnUnsigned(uint64_t value) override {
    if (arrays_ != 2) return Refuse("unexpected number");
    if (value > static_cast<uint64_t>(kMaxDimension))
      return Refuse("a number is larger than 2^48 - 1");
    if (numbers_.size() == 2 * static_cast<size_t>(kMaxDims))
      return Refuse("a box has too many dimensions");
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

 private:
  std::vector<Box>& Boxes() { return (*values_)[Number()]; }

  std::vector<std::vector<Box>>* values_;
  std::vector<int64_t> numbers_;  // of the box
  int arrays_ = 0;                // that are open
  bool in_root_ = false;
};

// The text of metadata key `key`, to `handler`.
Status ParseValues(std::string_view key, const std::string& text, int depth,
                   JsonHandler* handler) {
  const Status status = ParseJson(text, depth, handler);
  if (status.ok()) return status;
  return Status(status.kind(),
                "metadata " + std::string(key) + ": " + status.message())
      .WithTensor(status.tensor());
}

void AppendBoxes(std::string* out, const std::vector<Box>& boxes) {
  char next = '[';
  for (const Box& box : boxes) {
    *out += std::exchange(next, ',');
    *out += '[';
    for (const Dims* dims : {&box.offsets, &box.sizes}) {
      for (const int64_t n : *dims) {
        if (out->back() != '[') *out += ',';
        *out += std::to_string(n);
      }
    }
    *out += ']';
  }
  *out += ']';
}

}  // namespace

Status CheckPacked(Dtype dtype, const Dims& shape, const ShardEntry& shard) {
  if (!shard.global_shape) return Corrupt("a packed tensor has no shape");
  const Status whole = ByteSize(dtype, *shard.global_shape).status();
  if (!whole.ok()) return Corrupt("global shape: " + whole.message());
  if (shape.size() != 1 || shard.global_shape->empty())
    return Corrupt("a packed tensor has one dimension, of others");
  TC_ASSIGN_OR_RETURN(const uint64_t bytes, ByteSize(dtype, shape));
  uint64_t of_boxes = 0;
  for (const Box& box : shard.packed) {
    if (!Inside(box, *shard.global_shape)) {
      return Corrupt("box " + box.ToString() +
                     " is not inside the global shape " +
                     shard.global_shape->ToString());
    }
    TC_ASSIGN_OR_RETURN(const uint64_t of_box, ByteSize(dtype, box.sizes));
    const auto sum = CheckedAdd(of_boxes, of_box);
    if (of_box == 0 || !sum || *sum > bytes) {
      return Corrupt("box " + box.ToString() +
                     " is not in a packed tensor of " + std::to_string(bytes) +
                     " bytes");
    }
    of_boxes = *sum;
  }
  if (of_boxes == bytes) return {};
  return Corrupt("the boxes of a packed tensor have " +
                 std::to_string(of_boxes) + " of its " + std::to_string(bytes) +
                 " bytes");
}

Result<ShardingInfo> ParseShardingInfo(const SafetensorsHeader& header) {
  ShardingInfo out;
  if (const std::string* id = header.FindMetadata(kFileIdKey)) {
    if (!IsId(*id)) return Corrupt("the file id in the header is malformed");
    out.file_id = *id;
  }
  const std::string* text = header.FindMetadata(kShardingInfoKey);
  const std::string* shapes_text = header.FindMetadata(kGlobalShapesKey);
  const std::string* packed_text = header.FindMetadata(kPackedBoxesKey);
  if (!text && !shapes_text && !packed_text) return out;
  std::vector<std::optional<Dims>> offsets(header.tensors.size());
  std::vector<std::optional<Dims>> shapes(header.tensors.size());
  std::vector<std::vector<Box>> packed(header.tensors.size());
  if (packed_text) {
    BoxesHandler handler(header.tensors, &packed);
    TC_RETURN_IF_ERROR(ParseValues(kPackedBoxesKey, *packed_text, 3, &handler));
  }
  if (text) {
    out.has_sharding_info = true;
    DimsHandler handler(header.tensors, /*nested=*/true, packed, &offsets);
    TC_RETURN_IF_ERROR(ParseValues(kShardingInfoKey, *text, 3, &handler));
  }
  if (shapes_text) {
    DimsHandler handler(header.tensors, /*nested=*/false, packed, &shapes);
    TC_RETURN_IF_ERROR(
        ParseValues(kGlobalShapesKey, *shapes_text, 2, &handler));
  }
  // Where the key for global shapes is there, what it leaves out is whole.
  const bool rest_is_whole = shapes_text != nullptr;
  out.entries.reserve(header.tensors.size());
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    const SafetensorsEntry& t = header.tensors[i];
    ShardEntry entry{Dims::Filled(t.shape.size(), 0), shapes[i],
                     std::move(packed[i])};
    if (!entry.packed.empty()) {
      TC_RETURN_IF_ERROR((offsets[i] ? Corrupt("a packed tensor has offsets")
                                     : CheckPacked(t.dtype, t.shape, entry))
                             .WithTensor(t.name));
      out.entries.push_back(std::move(entry));
      continue;
    }
    if (offsets[i]) entry.offsets = *offsets[i];
    if (!entry.global_shape && rest_is_whole) entry.global_shape = t.shape;
    if (entry.global_shape) {
      const Box box{entry.offsets, t.shape};
      const auto bytes = ByteSize(t.dtype, *entry.global_shape);
      if (!bytes.ok())
        return Corrupt("global shape: " + bytes.status().message())
            .WithTensor(t.name);
      if (!Inside(box, *entry.global_shape)) {
        return Corrupt("box " + box.ToString() +
                       " is not inside the global shape " +
                       entry.global_shape->ToString())
            .WithTensor(t.name);
      }
    }
    out.entries.push_back(std::move(entry));
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> BuildFileMetadata(
    std::string_view file_id, const std::vector<SafetensorsEntry>& tensors,
    const std::vector<ShardEntry>* shards) {
  std::vector<std::pair<std::string, std::string>> out;
  if (!file_id.empty()) out.emplace_back(kFileIdKey, file_id);
  out.emplace_back("format", "pt");
  if (!shards) return out;
  out.emplace_back("DCP_VERSION", "1.0");
  std::string info = "{", shapes = "{", packed = "{";
  const auto add_name = [](std::string* text, const std::string& name) {
    if (text->size() > 1) *text += ',';
    AppendJsonString(text, name);
    *text += ':';
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ShardEntry& shard = (*shards)[i];
    if (!shard.packed.empty()) {
      add_name(&packed, tensors[i].name);
      AppendBoxes(&packed, shard.packed);
    } else {
      // A packed one has none: stock's readers then say that it is missing,
      // where they would take it for a tensor of one dimension.
      add_name(&info, tensors[i].name);
      info += "{\"saved_offsets\":";
      AppendJsonDims(&info, shard.offsets);
      info += '}';
      if (!shard.global_shape || *shard.global_shape == tensors[i].shape)
        continue;
    }
    add_name(&shapes, tensors[i].name);
    AppendJsonDims(&shapes, *shard.global_shape);
  }
  out.emplace_back(kShardingInfoKey, info + '}');
  out.emplace_back(kGlobalShapesKey, shapes + '}');
  if (packed.size() > 1) out.emplace_back(kPackedBoxesKey, packed + '}');
  return out;
}

std::string PeekFileId(ByteSpan first_bytes) {
  constexpr size_t kIdBytes = 32;
  if (first_bytes.size() < 8 + kPeekPrefix.size() + kIdBytes + 1) return {};
  const std::string_view text = AsText(first_bytes).substr(8);
  if (!text.starts_with(kPeekPrefix)) return {};
  const std::string_view id = text.substr(kPeekPrefix.size(), kIdBytes);
  if (!IsId(id) || text[kPeekPrefix.size() + kIdBytes] != '"') return {};
  return std::string(id);
}

}  // namespace torch_ckpt
