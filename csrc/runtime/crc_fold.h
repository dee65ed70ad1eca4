// CRCs by folding (Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction"), on x86-64: registers of the message are moved
// over the bytes that follow, and added to those. Of 64 bytes a step with
// PCLMULQDQ, of 256 with AVX-512 and VPCLMULQDQ, which reads at memory speed.
//
// The two are written twice: a function has one target, whatever template it is
// made from.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "runtime/crc_polynomial.h"

#define TC_FOLD_TARGET __attribute__((target("pclmul")))
#define TC_WIDE_FOLD_TARGET \
  __attribute__((target("pclmul,avx512f,avx512vl,vpclmulqdq")))

namespace torch_ckpt::crc {

inline bool CpuFolds() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") != 0;
}
inline bool CpuFoldsWide() {
  return CpuFolds() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("vpclmulqdq");
}

// What moves a 128-bit lane over `bits` bits: the half with the earlier bytes
// has 64 bits more to go. A product of two bit-reversed 64-bit factors comes
// out one bit low and a 32-bit factor sits in the upper half of its 64 bits,
// hence the odd exponents.
struct FoldFactors {
  long long early, late;
};
template <uint32_t kP, uint64_t kBits>
inline constexpr FoldFactors kFold = {
    static_cast<long long>(uint64_t{Power<kP>(kX, kBits + 32)} << 1),
    static_cast<long long>(uint64_t{Power<kP>(kX, kBits - 32)} << 1)};

// --- 64 bytes a step --------------------------------------------------------

TC_FOLD_TARGET inline __m128i Broadcast128(FoldFactors f) {
  return _mm_set_epi64x(f.late, f.early);
}

// `a` moved on by what `factors` say, plus `next`.
TC_FOLD_TARGET inline __m128i FoldInto(__m128i a, __m128i factors,
                                       __m128i next) {
  return _mm_xor_si128(
      _mm_xor_si128(_mm_clmulepi64_si128(a, factors, 0x00), next),
      _mm_clmulepi64_si128(a, factors, 0x11));
}

inline __m128i Load128(const unsigned char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

inline constexpr size_t kFoldStep = 64;

// Whole steps, and `kRest` for what they leave.
template <uint32_t kP, Update kRest>
TC_FOLD_TARGET uint32_t UpdateFolding(uint32_t crc, const unsigned char* p,
                                      size_t n) {
  if (n < kFoldStep) return kRest(crc, p, n);
  const __m128i by512 = Broadcast128(kFold<kP, 512>);
  const __m128i by128 = Broadcast128(kFold<kP, 128>);
  // The register so far is a part of the message: its first four bytes.
  __m128i a = _mm_xor_si128(Load128(p), _mm_cvtsi64_si128(crc));
  __m128i b = Load128(p + 16), c = Load128(p + 32), d = Load128(p + 48);
  for (p += kFoldStep, n -= kFoldStep; n >= kFoldStep;
       p += kFoldStep, n -= kFoldStep) {
    a = FoldInto(a, by512, Load128(p));
    b = FoldInto(b, by512, Load128(p + 16));
    c = FoldInto(c, by512, Load128(p + 32));
    d = FoldInto(d, by512, Load128(p + 48));
  }
  b = FoldInto(a, by128, b);
  c = FoldInto(b, by128, c);
  d = FoldInto(c, by128, d);
  for (; n >= 16; p += 16, n -= 16) d = FoldInto(d, by128, Load128(p));
  // 16 bytes are left that are congruent to all that came before them.
  alignas(16) unsigned char rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), d);
  return kRest(kRest(0, rest, sizeof rest), p, n);
}

// --- 256 bytes a step -------------------------------------------------------

TC_WIDE_FOLD_TARGET inline __m512i Broadcast512(FoldFactors f) {
  return _mm512_set_epi64(f.late, f.early, f.late, f.early, f.late, f.early,
                          f.late, f.early);
}

// Each lane of `a` moved on by what `factors` say, plus `next`.
TC_WIDE_FOLD_TARGET inline __m512i FoldInto(__m512i a, __m512i factors,
                                            __m512i next) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, factors, 0x00),
                                   _mm512_clmulepi64_epi128(a, factors, 0x11),
                                   next, kXor3);
}

// 64 bytes from `at` on; with kCopy they go to `to` as well, past the cache.
template <bool kCopy>
TC_WIDE_FOLD_TARGET inline __m512i Take(unsigned char* to,
                                        const unsigned char* p, size_t at) {
  const __m512i bytes = _mm512_loadu_si512(p + at);
  if constexpr (kCopy) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), bytes);
  }
  return bytes;
}

inline constexpr size_t kWideStep = 256;

// `kRest` is for the 64 bytes that are left at the end.
// REQUIRES: n is a multiple of kWideStep and not 0; with kCopy, `to` is aligned
// to 64.
template <uint32_t kP, Update kRest, bool kCopy>
TC_WIDE_FOLD_TARGET uint32_t WideSteps(uint32_t crc, unsigned char* to,
                                       const unsigned char* p, size_t n) {
  const __m512i by2048 = Broadcast512(kFold<kP, 2048>);
  const __m512i by512 = Broadcast512(kFold<kP, 512>);
  // The register so far is a part of the message: its first four bytes.
  const __m512i start =
      _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<long long>(crc));
  __m512i a = _mm512_xor_si512(Take<kCopy>(to, p, 0), start);
  __m512i b = Take<kCopy>(to, p, 64);
  __m512i c = Take<kCopy>(to, p, 128);
  __m512i d = Take<kCopy>(to, p, 192);
  for (size_t at = kWideStep; at < n; at += kWideStep) {
    a = FoldInto(a, by2048, Take<kCopy>(to, p, at));
    b = FoldInto(b, by2048, Take<kCopy>(to, p, at + 64));
    c = FoldInto(c, by2048, Take<kCopy>(to, p, at + 128));
    d = FoldInto(d, by2048, Take<kCopy>(to, p, at + 192));
  }
  b = FoldInto(a, by512, b);
  c = FoldInto(b, by512, c);
  d = FoldInto(c, by512, d);
  // 64 bytes are left that are congruent to all that came before them.
  alignas(64) unsigned char rest[64];
  _mm512_store_si512(rest, d);
  return kRest(0, rest, sizeof rest);
}

// Whole steps, and `kRest` for what they leave.
template <uint32_t kP, Update kRest>
uint32_t UpdateFoldingWide(uint32_t crc, const unsigned char* p, size_t n) {
  // Below this the ends cost more than the middle saves.
  constexpr size_t kWorthIt = 512;
  if (n < kWorthIt) return kRest(crc, p, n);
  const size_t whole = n / kWideStep * kWideStep;
  crc = WideSteps<kP, kRest, false>(crc, nullptr, p, whole);
  return kRest(crc, p + whole, n - whole);
}

}  // namespace torch_ckpt::crc

#endif  // __x86_64__
