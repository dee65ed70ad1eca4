// The bytes of our binary files: a magic, LEB128 varints, length-prefixed
// strings, and the CRC-32C of it all at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "base/box.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/names.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {

inline void PutVarint(std::string* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>((value & 0x7f) | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

inline void PutString(std::string* out, std::string_view text) {
  PutVarint(out, text.size());
  *out += text;
}

inline void PutDims(std::string* out, const Dims& dims) {
  for (int64_t value : dims) PutVarint(out, static_cast<uint64_t>(value));
}

inline void PutCrc(std::string* out) {
  const uint32_t crc = Crc32c(0, out->data(), out->size());
  char raw[sizeof crc];
  std::memcpy(raw, &crc, sizeof raw);
  out->append(raw, sizeof raw);
}

// What stands between magic and checksum. kCorrupt when either is wrong; `what`
// is the file's kind, for the message.
inline Result<ByteSpan> BinaryBody(ByteSpan bytes, std::string_view magic,
                                   const char* what) {
  uint32_t crc;
  if (bytes.size() < magic.size() + 1 + sizeof crc ||
      !AsText(bytes).starts_with(magic)) {
    return Corrupt(std::string("this is no ") + what + " file");
  }
  const ByteSpan checked = bytes.first(bytes.size() - sizeof crc);
  std::memcpy(&crc, checked.data() + checked.size(), sizeof crc);
  if (crc != Crc32c(0, checked.data(), checked.size())) {
    return Corrupt(std::string("the ") + what +
                   " is damaged: the checksum does not match");
  }
  return checked.subspan(magic.size());
}

// Every getter returns nothing once the bytes do not hold what it wants;
// nothing is allocated that is larger than what is left.
class BinaryReader {
 public:
  explicit BinaryReader(ByteSpan bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }
  size_t left() const { return left_.size(); }

  // LEB128 in its shortest form only, so that one content is one byte string.
  std::optional<uint64_t> Varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !left_.empty(); shift += 7) {
      const auto byte = static_cast<uint64_t>(left_.front());
      left_ = left_.subspan(1);
      const uint64_t bits = byte & 0x7f;
      if (shift == 63 && bits > 1) return std::nullopt;
      value |= bits << shift;
      if (byte & 0x80) continue;
      if (byte == 0 && shift > 0) return std::nullopt;
      return value;
    }
    return std::nullopt;
  }

  // At most `limit`.
  std::optional<uint64_t> Bounded(uint64_t limit) {
    const auto value = Varint();
    return value && *value <= limit ? value : std::nullopt;
  }

  // A length, at most `limit`, and so many bytes, which stay where they are.
  std::optional<ByteSpan> View(size_t limit) {
    const auto size = Bounded(limit);
    if (!size || *size > left_.size()) return std::nullopt;
    const ByteSpan bytes = left_.first(*size);
    left_ = left_.subspan(*size);
    return bytes;
  }

  // The same of UTF-8.
  std::optional<std::string_view> Text(size_t limit) {
    const auto bytes = View(limit);
    if (!bytes || !IsUtf8(AsText(*bytes))) return std::nullopt;
    return AsText(*bytes);
  }

  std::optional<std::string> String(size_t limit) {
    const auto text = Text(limit);
    return text ? std::optional(std::string(*text)) : std::nullopt;
  }

  std::optional<Dims> Sizes(int rank) {
    Dims dims;
    for (int d = 0; d < rank; ++d) {
      const auto value = Bounded(static_cast<uint64_t>(kMaxDimension));
      if (!value) return std::nullopt;
      dims.push_back(static_cast<int64_t>(*value));
    }
    return dims;
  }

 private:
  ByteSpan left_;
};

}  // namespace torch_ckpt
