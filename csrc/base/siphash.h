// SipHash-1-3: a hash with a secret key, so that nobody can choose names that
// collide (Aumasson and Bernstein, 2012; the rounds that Rust and Python use).
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace torch_ckpt {

inline uint64_t SipHash(const std::array<uint64_t, 2>& key,
                        std::string_view text) {
  uint64_t v0 = key[0] ^ 0x736f6d6570736575, v1 = key[1] ^ 0x646f72616e646f6d,
           v2 = key[0] ^ 0x6c7967656e657261, v3 = key[1] ^ 0x7465646279746573;
  const auto round = [&] {
    v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
    v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
  };
  const auto take = [&](uint64_t word) {
    v3 ^= word;
    round();
    v0 ^= word;
  };
  const auto length = static_cast<uint64_t>(text.size());
  while (text.size() >= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, text.data(), sizeof word);
    take(word);
    text.remove_prefix(sizeof word);
  }
  uint64_t last = 0;
  if (!text.empty()) std::memcpy(&last, text.data(), text.size());
  take(last | length << 56);
  v2 ^= 0xff;
  for (int i = 0; i < 3; ++i) round();
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace torch_ckpt
