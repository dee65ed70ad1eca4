#include "format/safetensors/safetensors.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "format/json.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMinHeaderBytes = 2;  // "{}"
// Root, entry, array; and what stands under keys of others.
constexpr int kHeaderDepth = 16;
constexpr std::string_view kMetadataKey = "__metadata__";

std::string Text(uint64_t value) { return std::to_string(value); }

// Fills a SafetensorsHeader straight from the events of the JSON text.
class HeaderHandler final : public JsonHandler {
 public:
  explicit HeaderHandler(SafetensorsHeader* out) : out_(out) {}

  bool OnKey(std::string_view key) override {
    if (skip_depth_ > 0) return true;
    switch (at_) {
      case At::kRoot:
        in_metadata_ = key == kMetadataKey;
        if (in_metadata_) return true;
        if (out_->tensors.size() >= kMaxTensorsPerFile)
          return Fail(Unsupported("more tensors than this build reads"));
        out_->tensors.emplace_back().name = key;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      case At::kMetadata:
        if (out_->metadata.size() >= kMaxMetadataEntries)
          return Fail(Unsupported("more metadata than this build reads"));
        out_->metadata.emplace_back(key, std::string());
        return true;
      case At::kEntry:
        if (key == "dtype") {
          field_ = Field::kDtype;
        } else if (key == "shape") {
          field_ = Field::kShape;
        } else if (key == "data_offsets") {
          field_ = Field::kOffsets;
        } else {
          field_ = Field::kOther;  // passed over, as safetensors does
        }
        return true;
      default:
        return Refuse("unexpected key");
    }
  }

  bool OnString(std::string_view text) override {
    if (Skipping()) return true;
    if (at_ == At::kMetadata) {
      out_->metadata.back().second = text;
      return true;
    }
    if (at_ != At::kEntry || field_ != Field::kDtype)
      return Refuse("unexpected string");
    const auto dtype = DtypeFromName(text);
    if (!dtype) return Refuse("unknown dtype");
    out_->tensors.back().dtype = *dtype;
    has_dtype_ = true;
    return true;
  }

  bool OnUnsigned(uint64_t value) override {
    if (Skipping()) return true;
    if (at_ == At::kShape) {
      Dims& shape = out_->tensors.back().shape;
      if (value > static_cast<uint64_t>(kMaxDimension))
        return Refuse("a dimension is larger than 2^48 - 1");
      if (shape.full()) return Fail(Unsupported("more than 8 dimensions"));
      shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (at_ != At::kOffsets) return Refuse("unexpected number");
    if (offsets_seen_ == 2)
      return Refuse("data_offsets has more than two numbers");
    SafetensorsEntry& entry = out_->tensors.back();
    (offsets_seen_ == 0 ? entry.begin : entry.end) = value;
    ++offsets_seen_;
    return true;
  }

  bool OnOtherNumber(double) override {
    return Skipping() || Refuse("unexpected number");
  }

  bool OnBool(bool) override {
    return Skipping() || Refuse("unexpected true or false");
  }

  bool OnNull() override {
    if (Skipping()) return true;
    if (at_ == At::kRoot && in_metadata_) return true;
    return Refuse("unexpected null");
  }

  bool OnBeginObject() override {
    if (Skipping()) return ++skip_depth_ > 0;
    switch (at_) {
      case At::kStart:
        at_ = At::kRoot;
        return true;
      case At::kRoot:
        at_ = in_metadata_ ? At::kMetadata : At::kEntry;
        field_ = Field::kNone;
        return true;
      default:
        return Refuse("unexpected object");
    }
  }

  bool OnEndObject() override {
    if (skip_depth_ > 0) return --skip_depth_ >= 0;
    if (at_ == At::kEntry && !(has_dtype_ && has_shape_ && has_offsets_))
      return Refuse("dtype, shape or data_offsets is missing");
    at_ = At::kRoot;
    return true;
  }

  bool OnBeginArray() override {
    if (Skipping()) return ++skip_depth_ > 0;
    if (at_ == At::kEntry && field_ == Field::kShape) {
      at_ = At::kShape;
      has_shape_ = true;
      return true;
    }
    if (at_ == At::kEntry && field_ == Field::kOffsets) {
      at_ = At::kOffsets;
      has_offsets_ = true;
      offsets_seen_ = 0;
      return true;
    }
    return Refuse("unexpected array");
  }

  bool OnEndArray() override {
    if (skip_depth_ > 0) return --skip_depth_ >= 0;
    if (at_ == At::kOffsets && offsets_seen_ != 2)
      return Refuse("data_offsets has fewer than two numbers");
    at_ = At::kEntry;
    return true;
  }

 protected:
  Status Locate(Status status) const override {
    const bool in_entry =
        at_ == At::kEntry || at_ == At::kShape || at_ == At::kOffsets;
    if (!out_->tensors.empty() &&
        (in_entry || (at_ == At::kRoot && !in_metadata_)))
      return std::move(status).WithTensor(out_->tensors.back().name);
    return status;
  }

 private:
  enum class At { kStart, kRoot, kMetadata, kEntry, kShape, kOffsets };
  enum class Field { kNone, kDtype, kShape, kOffsets, kOther };

  // Whether the value at hand stands under a key that we do not know.
  bool Skipping() const {
    return skip_depth_ > 0 || (at_ == At::kEntry && field_ == Field::kOther);
  }

  SafetensorsHeader* out_;
  At at_ = At::kStart;
  bool in_metadata_ = false;  // the current key of the root is __metadata__
  Field field_ = Field::kNone;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int offsets_seen_ = 0;
  int skip_depth_ = 0;  // of containers under such a key
};

void SortByOffset(std::vector<SafetensorsEntry>* tensors) {
  const auto before = [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  };
  if (!std::is_sorted(tensors->begin(), tensors->end(), before))
    std::stable_sort(tensors->begin(), tensors->end(), before);
}

// The rule both sides share: ranges follow each other from 0 without hole or
// overlap, and each is as long as dtype and shape say. Returns the data bytes.
Result<uint64_t> CheckTiling(const std::vector<SafetensorsEntry>& tensors) {
  uint64_t end = 0;
  for (const SafetensorsEntry& t : tensors) {
    const auto refuse = [&](std::string message) {
      return Corrupt(std::move(message)).WithTensor(t.name);
    };
    if (t.end < t.begin) return refuse("data_offsets run backwards");
    if (t.begin > end) {
      return refuse("a hole of " + Text(t.begin - end) +
                    " bytes before its data");
    }
    if (t.begin < end) return refuse("its data overlaps the tensor before it");
    const auto bytes = ByteSize(t.dtype, t.shape);
    if (!bytes.ok()) return refuse(bytes.status().message());
    if (*bytes != t.end - t.begin) {
      return refuse("dtype " + std::string(DtypeName(t.dtype)) + " and shape " +
                    t.shape.ToString() + " need " + Text(*bytes) +
                    " bytes, data_offsets give " + Text(t.end - t.begin));
    }
    end = t.end;
  }
  return end;
}

void AppendEntry(std::string* out, const SafetensorsEntry& t) {
  AppendJsonString(out, t.name);
  *out += ":{\"dtype\":\"";
  *out += DtypeName(t.dtype);
  *out += "\",\"shape\":";
  AppendJsonDims(out, t.shape);
  *out += ",\"data_offsets\":[";
  AppendUnsigned(out, t.begin);
  *out += ',';
  AppendUnsigned(out, t.end);
  *out += "]}";
}

// What our own parser would refuse is never written.
Status CheckWritable(
    const std::vector<std::pair<std::string, std::string>>& metadata,
    const std::vector<SafetensorsEntry>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(std::max(metadata.size(), tensors.size()));
  for (const auto& [key, value] : metadata) {
    // A key may be called "__metadata__"; the other rules are the same.
    if (key != kMetadataKey) TC_RETURN_IF_ERROR(CheckTensorName(key));
    if (!IsUtf8(value))
      return InvalidArgument("metadata '" + key + "' is not UTF-8");
    names.push_back(key);
  }
  if (FindDuplicate(names)) return InvalidArgument("twin metadata keys");
  names.clear();
  for (const SafetensorsEntry& t : tensors) {
    TC_RETURN_IF_ERROR(CheckTensorName(t.name));
    for (int64_t size : t.shape) {
      if (size < 0 || size > kMaxDimension) {
        return InvalidArgument("shape " + t.shape.ToString() +
                               " is out of range")
            .WithTensor(t.name);
      }
    }
    names.push_back(t.name);
  }
  if (const auto twin = FindDuplicate(names)) {
    return InvalidArgument("two tensors of one name in one file")
        .WithTensor(std::string(*twin));
  }
  const auto bytes = CheckTiling(tensors);
  if (!bytes.ok()) {
    return Status(ErrorKind::kInvalidArgument, bytes.status().message())
        .WithTensor(bytes.status().tensor());
  }
  return {};
}

}  // namespace

const std::string* SafetensorsHeader::FindMetadata(std::string_view key) const {
  for (const auto& [k, v] : metadata) {
    if (k == key) return &v;
  }
  return nullptr;
}

Result<uint64_t> ParseHeaderLength(ByteSpan first8, uint64_t file_bytes) {
  if (file_bytes < kLengthBytes || first8.size() < kLengthBytes) {
    return Corrupt("a file of " + Text(file_bytes) +
                   " bytes is too short to be safetensors");
  }
  const uint64_t length = LoadU64(first8.data());
  if (length > kMaxHeaderBytes) {
    return Corrupt("the header length field says " + Text(length) +
                   " bytes, more than " + Text(kMaxHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes) {
    return Corrupt("the header of " + Text(length) + " bytes does not fit in " +
                   Text(file_bytes) + " bytes of file");
  }
  if (length < kMinHeaderBytes) return Corrupt("the header is empty");
  return length;
}

Result<SafetensorsHeader> ParseSafetensorsHeader(ByteSpan header,
                                                 uint64_t file_bytes) {
  if (header.size() > kMaxHeaderBytes || file_bytes < kLengthBytes ||
      header.size() > file_bytes - kLengthBytes)
    return Corrupt("the header does not fit in the file");

  std::string_view text = AsText(header);
  // The object starts at once, and only spaces follow it: more is JSON to
  // some readers and not to others.
  if (text.empty() || text.front() != '{')
    return Corrupt("the header does not start with '{'");
  text = text.substr(0, text.find_last_not_of(' ') + 1);
  if (text.back() != '}')
    return Corrupt("the header does not end with '}' and spaces");

  SafetensorsHeader out;
  out.data_begin = kLengthBytes + header.size();
  out.file_bytes = file_bytes;
  HeaderHandler handler(&out);
  TC_RETURN_IF_ERROR(ParseJson(text, kHeaderDepth, &handler));

  SortByOffset(&out.tensors);
  TC_ASSIGN_OR_RETURN(const uint64_t data_bytes, CheckTiling(out.tensors));
  const uint64_t present = file_bytes - out.data_begin;
  if (data_bytes != present) {
    return Corrupt("the header describes " + Text(data_bytes) +
                   " bytes of data, the file holds " + Text(present));
  }
  return out;
}

Result<std::string> BuildSafetensorsHeader(
    const std::vector<std::pair<std::string, std::string>>& metadata,
    const std::vector<SafetensorsEntry>& tensors) {
  TC_RETURN_IF_ERROR(CheckWritable(metadata, tensors));
  std::string out;
  AppendU64(&out, 0);  // the length, below
  out += '{';
  bool first = true;
  const auto separate = [&] {
    if (!first) out += ',';
    first = false;
  };
  if (!metadata.empty()) {
    separate();
    AppendJsonString(&out, kMetadataKey);
    out += ":{";
    for (size_t i = 0; i < metadata.size(); ++i) {
      if (i) out += ',';
      AppendJsonString(&out, metadata[i].first);
      out += ':';
      AppendJsonString(&out, metadata[i].second);
    }
    out += '}';
  }
  for (const SafetensorsEntry& t : tensors) {
    separate();
    AppendEntry(&out, t);
  }
  out += '}';
  out.resize(RoundUp(out.size(), kDataAlignment), ' ');
  const uint64_t length = out.size() - kLengthBytes;
  if (length > kMaxHeaderBytes) {
    return Unsupported("the header would have " + Text(length) +
                       " bytes; safetensors readers take " +
                       Text(kMaxHeaderBytes) + ". Use more files");
  }
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

}  // namespace torch_ckpt
