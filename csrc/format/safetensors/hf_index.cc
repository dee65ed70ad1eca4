#include "format/safetensors/hf_index.h"

#include <string_view>

#include "format/json.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMaxIndexNames = 10'000'000;
constexpr int kIndexDepth = 16;  // of keys that are skipped

class IndexHandler final : public JsonHandler {
 public:
  IndexHandler(std::string_view suffix, HfIndex* out)
      : suffix_(suffix), out_(out) {}
  bool has_weight_map() const { return has_weight_map_; }

  bool OnKey(std::string_view key) override {
    if (skip_depth_ > 0) return true;
    if (depth_ == 1) {
      key_ = key == "metadata"     ? Key::kMetadata
             : key == "weight_map" ? Key::kWeightMap
                                   : Key::kOther;
      return true;
    }
    if (key_ == Key::kMetadata) {
      is_total_size_ = key == "total_size";
      return true;
    }
    if (out_->weight_map.size() >= kMaxIndexNames)
      return Fail(Unsupported("more names than this build reads"));
    out_->weight_map.emplace_back(key, std::string());
    return true;
  }
  bool OnString(std::string_view text) override {
    if (Skipping() || AtTotalSize()) return true;
    if (depth_ != 2 || key_ != Key::kWeightMap)
      return Refuse("unexpected string");
    // As people write paths below the directory.
    while (text.starts_with("./")) text.remove_prefix(2);
    const auto count = out_->weight_map.size();
    const bool same = count > 1 && out_->weight_map[count - 2].second == text;
    if (!same) {
      Status status = CheckFilePath(text);
      if (status.ok() && !text.ends_with(suffix_))
        status =
            Corrupt("a file name in the index is not *" + std::string(suffix_));
      if (!status.ok()) {
        return Fail(
            std::move(status).WithTensor(out_->weight_map.back().first));
      }
    }
    out_->weight_map.back().second = text;
    return true;
  }
  bool OnUnsigned(uint64_t value) override {
    if (Skipping()) return true;
    if (!AtTotalSize()) return Refuse("unexpected number");
    out_->total_size = value;
    return true;
  }
  // Writers that count bits in floating point made indexes with a total_size
  // such as 26906.0 or 125.5, and those are on the Hub. It is only a hint.
  bool OnOtherNumber(double value) override {
    if (Skipping()) return true;
    constexpr double kLimit = 9.2e18;
    if (!AtTotalSize()) return Refuse("unexpected number");
    if (value >= 0 && value <= kLimit) {
      out_->total_size = static_cast<uint64_t>(value);
    }
    return true;
  }
  bool OnBool(bool) override {
    return Skipping() || AtTotalSize() || Refuse("unexpected true or false");
  }
  bool OnNull() override {
    if (Skipping() || AtTotalSize() || (depth_ == 1 && key_ == Key::kMetadata))
      return true;
    return Refuse("unexpected null");
  }
  bool OnBeginObject() override { return Begin(/*object=*/true); }
  bool OnEndObject() override { return End(); }
  bool OnBeginArray() override { return Begin(/*object=*/false); }
  bool OnEndArray() override { return End(); }

 private:
  enum class Key { kMetadata, kWeightMap, kOther };

  bool AtTotalSize() const {
    return depth_ == 2 && key_ == Key::kMetadata && is_total_size_;
  }
  // True when the value at hand belongs to a key that we do not know.
  bool Skipping() const {
    return skip_depth_ > 0 || (depth_ == 1 && key_ == Key::kOther) ||
           (depth_ == 2 && key_ == Key::kMetadata && !is_total_size_);
  }
  bool Begin(bool object) {
    if (depth_ > 0 && (Skipping() || AtTotalSize())) {
      ++skip_depth_;
      return true;
    }
    if (!object || depth_ == 2)
      return Refuse(object ? "unexpected object" : "unexpected array");
    if (++depth_ == 2 && key_ == Key::kWeightMap) has_weight_map_ = true;
    return true;
  }
  bool End() {
    --(skip_depth_ > 0 ? skip_depth_ : depth_);
    return true;
  }

  const std::string_view suffix_;
  HfIndex* out_;
  bool has_weight_map_ = false;
  int depth_ = 0;       // of the objects that we read
  int skip_depth_ = 0;  // below them
  Key key_ = Key::kOther;
  bool is_total_size_ = false;
};

}  // namespace

Result<HfIndex> ParseHfIndex(ByteSpan text, std::string_view suffix) {
  if (text.size() > kMaxIndexBytes)
    return Unsupported("the index is larger than 512 MiB");
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // of some editors
  std::string_view json = AsText(text);
  if (json.starts_with(kMark)) json.remove_prefix(kMark.size());
  HfIndex out;
  IndexHandler handler(suffix, &out);
  TC_RETURN_IF_ERROR(ParseJson(json, kIndexDepth, &handler));
  if (!handler.has_weight_map()) return Corrupt("the index has no weight_map");
  return out;
}

std::string BuildHfIndex(const HfIndex& index) {
  std::string out = "{\n  \"metadata\": {\n    \"total_size\": ";
  AppendUnsigned(&out, index.total_size);
  out += "\n  },\n  \"weight_map\": {";
  bool first = true;
  for (const auto& [name, file] : index.weight_map) {
    out += first ? "\n    " : ",\n    ";
    first = false;
    AppendJsonString(&out, name);
    out += ": ";
    AppendJsonString(&out, file);
  }
  out += first ? "}\n}" : "\n  }\n}";
  return out;
}

}  // namespace torch_ckpt
