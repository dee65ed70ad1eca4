// CRCs by the instructions that CPUs have for them, on three streams at once:
// their latency is three cycles, their throughput one. x86-64 has one for
// Castagnoli's polynomial only, arm64 has them for IEEE's as well.
//
// TC_CRC_TARGET is defined where the architecture has any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/crc_polynomial.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TC_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TC_CRC_TARGET __attribute__((target("+crc")))
#endif

#ifdef TC_CRC_TARGET

namespace torch_ckpt::crc {

inline bool CpuHasInstruction() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

template <uint32_t kP>
TC_CRC_TARGET inline uint32_t Step8(uint32_t crc, uint64_t v) {
#if defined(__x86_64__)
  static_assert(kP == kCastagnoli);
  return static_cast<uint32_t>(_mm_crc32_u64(crc, v));
#else
  static_assert(kP == kCastagnoli || kP == kIeee);
  return kP == kCastagnoli ? __crc32cd(crc, v) : __crc32d(crc, v);
#endif
}

template <uint32_t kP>
TC_CRC_TARGET inline uint32_t Step1(uint32_t crc, unsigned char v) {
#if defined(__x86_64__)
  static_assert(kP == kCastagnoli);
  return _mm_crc32_u8(crc, v);
#else
  static_assert(kP == kCastagnoli || kP == kIeee);
  return kP == kCastagnoli ? __crc32cb(crc, v) : __crc32b(crc, v);
#endif
}

// Multiplication by x^(8 * bytes), a table for each byte of the register.
template <uint32_t kP>
class Shift {
 public:
  explicit constexpr Shift(uint64_t bytes) : table_{} {
    const uint32_t factor = Power<kP>(kX8, bytes);
    for (size_t k = 0; k < 4; ++k) {
      // Linear, so eight products fill the table.
      for (uint32_t bit = 0; bit < 8; ++bit) {
        const uint32_t image =
            Multiply<kP>(factor, uint32_t{1} << (8 * k + bit));
        for (uint32_t low = 0; low < uint32_t{1} << bit; ++low) {
          table_[k][(uint32_t{1} << bit) + low] = image ^ table_[k][low];
        }
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return table_[0][crc & 0xff] ^ table_[1][(crc >> 8) & 0xff] ^
           table_[2][(crc >> 16) & 0xff] ^ table_[3][crc >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_;
};
template <uint32_t kP, size_t kBytes>
inline constexpr Shift<kP> kShift{kBytes};

// Bytes per stream. The long one makes the join cheap, the short one serves
// buffers of a few KiB, and copies.
inline constexpr size_t kLong = 4096, kShort = 256;

// The register of three streams of kStream bytes each, one after the other.
template <uint32_t kP, size_t kStream>
uint32_t Join(uint32_t first, uint32_t second, uint32_t third) {
  constexpr const auto& kOver = kShift<kP, kStream>;
  return kOver(kOver(first) ^ second) ^ third;
}

// Whole blocks of three streams: [p, p + n). With kCopy they go to `to` as
// well.
template <uint32_t kP, size_t kStream, bool kCopy>
TC_CRC_TARGET inline uint32_t ThreeStreams(uint32_t crc, unsigned char* to,
                                           const unsigned char* p, size_t n) {
  const auto take = [&](size_t at) {
    const uint64_t v = Load64(p + at);
    if constexpr (kCopy) std::memcpy(to + at, &v, sizeof v);
    return v;
  };
  for (size_t end = 3 * kStream; end <= n; end += 3 * kStream) {
    uint32_t second = 0, third = 0;
    for (size_t at = end - 3 * kStream; at < end - 2 * kStream; at += 8) {
      crc = Step8<kP>(crc, take(at));
      second = Step8<kP>(second, take(at + kStream));
      third = Step8<kP>(third, take(at + 2 * kStream));
    }
    crc = Join<kP, kStream>(crc, second, third);
  }
  return crc;
}

// What three streams are not worth it for.
template <uint32_t kP>
TC_CRC_TARGET inline uint32_t UpdateOneStream(uint32_t crc,
                                              const unsigned char* p,
                                              size_t n) {
  for (; n >= 8; p += 8, n -= 8) crc = Step8<kP>(crc, Load64(p));
  for (; n != 0; ++p, --n) crc = Step1<kP>(crc, *p);
  return crc;
}

template <uint32_t kP>
TC_CRC_TARGET uint32_t UpdateInstruction(uint32_t crc, const unsigned char* p,
                                         size_t n) {
  size_t done = n / (3 * kLong) * (3 * kLong);
  crc = ThreeStreams<kP, kLong, false>(crc, nullptr, p, done);
  const size_t more = (n - done) / (3 * kShort) * (3 * kShort);
  crc = ThreeStreams<kP, kShort, false>(crc, nullptr, p + done, more);
  done += more;
  return UpdateOneStream<kP>(crc, p + done, n - done);
}

}  // namespace torch_ckpt::crc

#endif  // TC_CRC_TARGET
