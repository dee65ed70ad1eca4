// Views of bytes and little-endian integers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace torch_ckpt {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and is never swapped here");

using ByteSpan = std::span<const std::byte>;
using MutableByteSpan = std::span<std::byte>;

inline ByteSpan AsBytes(std::string_view s) {
  return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}
inline std::string_view AsText(ByteSpan b) {
  return {reinterpret_cast<const char*>(b.data()), b.size()};
}

template <class T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline uint64_t LoadU64(const std::byte* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void AppendU64(std::string* out, uint64_t v) {
  char raw[sizeof v];
  std::memcpy(raw, &v, sizeof v);
  out->append(raw, sizeof v);
}

inline constexpr std::string_view kHexDigits = "0123456789abcdef";

// The last `digits` digits of a number.
inline void AppendHex(std::string* out, uint64_t number, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) {
    *out += kHexDigits[number >> shift & 15];
  }
}
inline void AppendHex(std::string* out, ByteSpan bytes) {
  for (const std::byte byte : bytes) {
    AppendHex(out, static_cast<uint64_t>(byte), 2);
  }
}
// The number that AppendHex wrote with so many digits as `text` has, 16 at
// most; nullopt for anything else.
inline std::optional<uint64_t> ParseHex(std::string_view text) {
  if (text.empty() || text.size() > 16) return std::nullopt;
  uint64_t number = 0;
  for (const char c : text) {
    const size_t digit = kHexDigits.find(c);
    if (digit == kHexDigits.npos) return std::nullopt;
    number = number << 4 | digit;
  }
  return number;
}

}  // namespace torch_ckpt
