#include "format/zarr/zarr_array.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "format/json.h"

namespace torch_ckpt {
namespace {

constexpr int kDepth = 2;  // of the root, and a list in it

struct NamedDtype {
  std::string_view name;
  Dtype dtype;
};
constexpr std::array kDtypes = {
    NamedDtype{"bfloat16", Dtype::kBF16}, NamedDtype{"<f2", Dtype::kF16},
    NamedDtype{"<f4", Dtype::kF32},       NamedDtype{"<f8", Dtype::kF64},
    NamedDtype{"<i2", Dtype::kI16},       NamedDtype{"<i4", Dtype::kI32},
    NamedDtype{"<i8", Dtype::kI64},       NamedDtype{"<u2", Dtype::kU16},
    NamedDtype{"<u4", Dtype::kU32},       NamedDtype{"<u8", Dtype::kU64},
    NamedDtype{"|i1", Dtype::kI8},        NamedDtype{"|u1", Dtype::kU8},
    NamedDtype{"|b1", Dtype::kBool},      NamedDtype{"<c8", Dtype::kC64},
};

enum class Key : uint8_t {
  kFormat,
  kShape,
  kChunks,
  kDtype,
  kOrder,
  kCompressor,
  kFilters,
  kFillValue,
  kSeparator,
  kCount,
};
constexpr std::array<std::string_view, static_cast<size_t>(Key::kCount)> kKeys =
    {"zarr_format", "shape",      "chunks",
     "dtype",       "order",      "compressor",
     "filters",     "fill_value", "dimension_separator"};

class ArrayHandler final : public JsonHandler {
 public:
  explicit ArrayHandler(ZarrArray* out) : out_(out) {}
  bool has(Key key) const { return seen_[static_cast<size_t>(key)]; }

  bool OnBeginObject() override {
    if (depth_++ == 0) return true;
    return Fail(At("is one that is not read"));
  }
  bool OnEndObject() override { return --depth_ >= 0; }
  bool OnKey(std::string_view key) override {
    for (size_t i = 0; i < kKeys.size(); ++i) {
      if (key != kKeys[i]) continue;
      key_ = static_cast<Key>(i);
      seen_[i] = true;
      return true;
    }
    return Fail(Unsupported("has the key '" + std::string(key) +
                            "', which is not known"));
  }
  bool OnBeginArray() override {
    if (key_ == Key::kShape || key_ == Key::kChunks) {
      return Once() && (listed_ = true);
    }
    return Fail(At("is one that is not read"));
  }
  bool OnEndArray() override {
    listed_ = false;
    return true;
  }
  bool OnUnsigned(uint64_t value) override {
    if (listed_) {
      Dims& dims = key_ == Key::kShape ? out_->shape : out_->chunks;
      if (dims.full()) {
        return Fail(Unsupported("has more than " + std::to_string(kMaxDims) +
                                " dimensions"));
      }
      if (value > static_cast<uint64_t>(kMaxDimension)) {
        return Fail(Unsupported("has a dimension above 2^48"));
      }
      dims.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (key_ == Key::kFormat && value == 2) return true;
    return IsFill() || Fail(At("is " + std::to_string(value)));
  }
  bool OnOtherNumber(double) override { return IsFill() || BadNumber(); }
  bool OnBool(bool) override { return IsFill() || BadNumber(); }
  bool OnNull() override {
    return (!listed_ && (key_ == Key::kCompressor || key_ == Key::kFilters ||
                         key_ == Key::kFillValue)) ||
           Refuse("has null where a value is due");
  }
  bool OnString(std::string_view text) override {
    if (listed_) return BadNumber();
    switch (key_) {
      case Key::kDtype:
        return SetDtype(text);
      case Key::kOrder:
        return text == "C" || Fail(At("is '" + std::string(text) + "'"));
      case Key::kSeparator:
        return text == "." || Fail(At("is '" + std::string(text) + "'"));
      default:
        return IsFill() || Refuse("has text where a value is due");
    }
  }

 private:
  bool IsFill() const { return !listed_ && key_ == Key::kFillValue; }
  bool BadNumber() { return Refuse("has a size that is no number"); }
  // Two lists of one key there are none; JSON with twin keys is refused.
  bool Once() { return !listed_ || Refuse("has a list in a list"); }
  Status At(const std::string& what) const {
    return Unsupported("its " + std::string(kKeys[static_cast<size_t>(key_)]) +
                       " " + what + ": only plain chunks are read");
  }
  bool SetDtype(std::string_view text) {
    for (const NamedDtype& each : kDtypes) {
      if (text != each.name) continue;
      out_->dtype = each.dtype;
      return true;
    }
    if (text == "<c16") {
      out_->other_dtype = "complex128";
      return true;
    }
    return Fail(At("is '" + std::string(text) + "'"));
  }

  ZarrArray* out_;
  Key key_ = Key::kFormat;
  std::array<bool, kKeys.size()> seen_{};
  int depth_ = 0;
  bool listed_ = false;
};

}  // namespace

Result<ZarrArray> ParseZarrArray(std::string_view text) {
  ZarrArray out;
  ArrayHandler handler(&out);
  TC_RETURN_IF_ERROR(ParseJson(text, kDepth, &handler));
  for (const Key key : {Key::kFormat, Key::kShape, Key::kChunks, Key::kDtype,
                        Key::kOrder, Key::kCompressor, Key::kFilters}) {
    if (!handler.has(key)) {
      return Corrupt("has no " + std::string(kKeys[static_cast<size_t>(key)]));
    }
  }
  if (out.shape.size() != out.chunks.size()) {
    return Corrupt("has chunks of " + out.chunks.ToString() +
                   " of a tensor of shape " + out.shape.ToString());
  }
  for (const int64_t size : out.chunks) {
    if (size == 0) return Corrupt("has chunks of size 0");
  }
  if (out.other_dtype.empty()) {
    TC_RETURN_IF_ERROR(ByteSize(out.dtype, out.shape).status());
    TC_RETURN_IF_ERROR(ByteSize(out.dtype, out.chunks).status());
  }
  return out;
}

std::optional<Dims> ParseZarrChunkName(std::string_view name, int dims) {
  if (dims == 0) {
    return name == "0" ? std::optional<Dims>(Dims()) : std::nullopt;
  }
  Dims out;
  while (true) {
    const size_t dot = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, dot);
    int64_t number = 0;
    const auto [end, error] =
        std::from_chars(part.data(), part.data() + part.size(), number);
    const bool fits = error == std::errc() &&
                      end == part.data() + part.size() && part[0] != '-' &&
                      number <= kMaxDimension &&
                      (part == "0" || part[0] != '0') && out.size() < dims;
    if (!fits) return std::nullopt;
    out.push_back(number);
    if (dot == name.size()) break;
    name.remove_prefix(dot + 1);
  }
  return out.size() == dims ? std::optional<Dims>(out) : std::nullopt;
}

bool IsZarrChunkName(std::string_view name) {
  const auto dims = std::count(name.begin(), name.end(), '.') + 1;
  return dims <= kMaxDims && ParseZarrChunkName(name, static_cast<int>(dims));
}

std::string ZarrChunkName(std::span<const int64_t> chunk) {
  std::string out;
  for (const int64_t number : chunk) {
    if (!out.empty()) out += '.';
    out += std::to_string(number);
  }
  return out.empty() ? "0" : out;
}

}  // namespace torch_ckpt
