// CRC-32C as polynomials over GF(2).
//
// A register holds a polynomial bit-reversed: bit 31 is x^0. Appending n bits
// multiplies by x^n modulo P, which is linear; so streams that were run apart
// are joined by shifting the earlier ones over the bytes of the later ones, and
// the usual inversion before and after cancels out of every combination.
//
//   portable   slicing by 8
//   x86-64     the crc32 instruction on three streams at once (its latency is
//              three cycles, its throughput one); with AVX-512 and VPCLMULQDQ
//              folding of 256 bytes a step, which reads at memory speed
//   arm64      the crc32c instructions on three streams
//
// Copies take every word once, from where it is to its target and into the
// digest. On x86-64 it is stored past the caches, in whole lines; cores of
// arm64 see by themselves that lines are written whole.
#include "runtime/crc32c.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define TC_CRC_TARGET __attribute__((target("sse4.2")))
#define TC_FOLD_TARGET \
  __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TC_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace torch_ckpt {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli, bit-reversed
constexpr uint32_t kOne = uint32_t{1} << 31;  // x^0

constexpr uint32_t TimesX(uint32_t a) {
  return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0);
}

// a * b mod P.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = TimesX(b);
  }
  return product;
}

// base^n mod P by repeated squaring.
constexpr uint32_t Power(uint32_t base, uint64_t n) {
  uint32_t result = kOne;
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) result = Multiply(result, base);
    base = Multiply(base, base);
  }
  return result;
}

constexpr uint32_t kX = kOne >> 1;
constexpr uint32_t kX8 = kOne >> 8;

// x^8 to the power of 1, 2, 4, ...: what `n` bytes more multiply a CRC by is
// the product of those that the bits of n name.
constexpr std::array<uint32_t, 64> kPowersOfX8 = [] {
  std::array<uint32_t, 64> powers{};
  uint32_t power = kX8;
  for (uint32_t& entry : powers) {
    entry = power;
    power = Multiply(power, power);
  }
  return powers;
}();

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// kSlices[k][b]: byte b followed by k zero bytes.
constexpr Tables MakeSlices() {
  Tables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int i = 0; i < 8; ++i) c = TimesX(c);
    t[0][b] = c;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
    }
  }
  return t;
}
constexpr Tables kSlices = MakeSlices();

uint64_t Load64(const unsigned char* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

constexpr size_t kLine = 64;  // of the caches

// All the functions below work on the register, not inverted.
using Update = uint32_t (*)(uint32_t, const unsigned char*, size_t);
using Copy = uint32_t (*)(uint32_t, unsigned char*, const unsigned char*,
                          size_t);

uint32_t UpdatePortable(uint32_t crc, const unsigned char* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t v = Load64(p) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kSlices[7 - k][(v >> (8 * k)) & 0xff];
  }
  for (; n != 0; ++p, --n) crc = (crc >> 8) ^ kSlices[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(__x86_64__)
struct Line {
  __m128i parts[4];
};

// Copies a line past the caches. Returns it.
inline Line CopyLine(unsigned char* to, const unsigned char* p) {
  const auto* const from = reinterpret_cast<const __m128i*>(p);
  auto* const target = reinterpret_cast<__m128i*>(to);
  const Line line = {{_mm_loadu_si128(from), _mm_loadu_si128(from + 1),
                      _mm_loadu_si128(from + 2), _mm_loadu_si128(from + 3)}};
  for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, line.parts[i]);
  return line;
}
#endif

#ifdef TC_CRC_TARGET

// Bytes per stream. The long one makes the join cheap, the short one serves
// buffers of a few KiB, and copies.
constexpr size_t kLong = 4096, kShort = 256;

// Multiplication by x^(8 * bytes), a table for each byte of the register.
class Shift {
 public:
  explicit constexpr Shift(uint64_t bytes) : table_{} {
    const uint32_t factor = Power(kX8, bytes);
    for (size_t k = 0; k < 4; ++k) {
      // Linear, so eight products fill the table.
      for (uint32_t bit = 0; bit < 8; ++bit) {
        const uint32_t image = Multiply(factor, uint32_t{1} << (8 * k + bit));
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
constexpr Shift kShiftLong(kLong), kShiftShort(kShort);

#if defined(__x86_64__)
TC_CRC_TARGET inline uint32_t Step8(uint32_t crc, uint64_t v) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, v));
}
TC_CRC_TARGET inline uint32_t Step1(uint32_t crc, unsigned char v) {
  return _mm_crc32_u8(crc, v);
}
TC_CRC_TARGET inline uint32_t StepLine(uint32_t crc, const Line& line) {
  for (const __m128i& part : line.parts) {
    crc = Step8(crc, static_cast<uint64_t>(_mm_cvtsi128_si64(part)));
    crc = Step8(crc, static_cast<uint64_t>(_mm_extract_epi64(part, 1)));
  }
  return crc;
}
// What is there, and past the end what is there or not.
inline void Prefetch(const unsigned char* p, size_t ahead) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p) + ahead;
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}
#else
TC_CRC_TARGET inline uint32_t Step8(uint32_t crc, uint64_t v) {
  return __crc32cd(crc, v);
}
TC_CRC_TARGET inline uint32_t Step1(uint32_t crc, unsigned char v) {
  return __crc32cb(crc, v);
}
#endif

// Whole blocks of three streams: [p, p + n). With kCopy they go to `to` as
// well.
template <size_t kStream, bool kCopy>
TC_CRC_TARGET inline uint32_t ThreeStreams(uint32_t crc, const Shift& shift,
                                           unsigned char* to,
                                           const unsigned char* p, size_t n) {
  const auto take = [&](size_t at) {
    const uint64_t v = Load64(p + at);
    if constexpr (kCopy) std::memcpy(to + at, &v, sizeof v);
    return v;
  };
  for (size_t end = 3 * kStream; end <= n; end += 3 * kStream) {
    uint32_t second = 0, third = 0;
    for (size_t at = end - 3 * kStream; at < end - 2 * kStream; at += 8) {
      crc = Step8(crc, take(at));
      second = Step8(second, take(at + kStream));
      third = Step8(third, take(at + 2 * kStream));
    }
    crc = shift(shift(crc) ^ second) ^ third;
  }
  return crc;
}

TC_CRC_TARGET uint32_t UpdateInstruction(uint32_t crc, const unsigned char* p,
                                         size_t n) {
  size_t done = n / (3 * kLong) * (3 * kLong);
  crc = ThreeStreams<kLong, false>(crc, kShiftLong, nullptr, p, done);
  const size_t more = (n - done) / (3 * kShort) * (3 * kShort);
  crc = ThreeStreams<kShort, false>(crc, kShiftShort, nullptr, p + done, more);
  done += more;
  for (; n - done >= 8; done += 8) crc = Step8(crc, Load64(p + done));
  for (; done < n; ++done) crc = Step1(crc, p[done]);
  return crc;
}

#if defined(__x86_64__)
constexpr size_t kCopyStep = 3 * kShort;

// Three streams too, but by whole lines: the buffers that combine stores past
// the caches are few, and a line that leaves them in parts costs as much as
// many (AMD Zen 3: 0.6 GB/s by 8 bytes, 12 by lines, where memcpy has 15).
// Short streams, because lines 4 KiB apart are in each other's way there (2.8).
TC_CRC_TARGET uint32_t CopyInstruction(uint32_t crc, unsigned char* to,
                                       const unsigned char* p, size_t n) {
  constexpr size_t kAhead = 2 * kCopyStep;
  for (size_t block = 0; block < n; block += kCopyStep) {
    uint32_t second = 0, third = 0;
    for (size_t at = block; at < block + kShort; at += kLine) {
      for (size_t i = 0; i < 3; ++i) Prefetch(p + at, i * kShort + kAhead);
      const auto copy = [&](size_t stream) {
        return CopyLine(to + at + stream * kShort, p + at + stream * kShort);
      };
      crc = StepLine(crc, copy(0));
      second = StepLine(second, copy(1));
      third = StepLine(third, copy(2));
    }
    crc = kShiftShort(kShiftShort(crc) ^ second) ^ third;
  }
  return crc;
}
#else
constexpr size_t kCopyStep = 3 * kLong;

TC_CRC_TARGET uint32_t CopyInstruction(uint32_t crc, unsigned char* to,
                                       const unsigned char* p, size_t n) {
  return ThreeStreams<kLong, true>(crc, kShiftLong, to, p, n);
}
#endif

#endif  // TC_CRC_TARGET

#ifdef TC_FOLD_TARGET

// What moves a 128-bit lane over `bits` bits: the half with the earlier bytes
// has 64 bits more to go. A product of two bit-reversed 64-bit factors comes
// out one bit low and a 32-bit factor sits in the upper half of its 64 bits,
// hence the odd exponents.
struct FoldFactors {
  uint64_t early, late;
};
constexpr FoldFactors Fold(uint64_t bits) {
  return {uint64_t{Power(kX, bits + 32)} << 1,
          uint64_t{Power(kX, bits - 32)} << 1};
}

TC_FOLD_TARGET inline __m512i Broadcast(FoldFactors f) {
  const auto early = static_cast<long long>(f.early);
  const auto late = static_cast<long long>(f.late);
  return _mm512_set_epi64(late, early, late, early, late, early, late, early);
}

// Each lane of `a` moved on by what `factors` say, plus `next`.
TC_FOLD_TARGET inline __m512i FoldInto(__m512i a, __m512i factors,
                                       __m512i next) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, factors, 0x00),
                                   _mm512_clmulepi64_epi128(a, factors, 0x11),
                                   next, kXor3);
}

// 64 bytes from `at` on; with kCopy they go to `to` as well, past the cache.
template <bool kCopy>
TC_FOLD_TARGET inline __m512i Take(unsigned char* to, const unsigned char* p,
                                   size_t at) {
  const __m512i bytes = _mm512_loadu_si512(p + at);
  if constexpr (kCopy) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), bytes);
  }
  return bytes;
}

constexpr size_t kFoldStep = 256;

// REQUIRES: n is a multiple of kFoldStep and not 0; with kCopy, `to` is aligned
// to 64.
template <bool kCopy>
TC_FOLD_TARGET uint32_t FoldSteps(uint32_t crc, unsigned char* to,
                                  const unsigned char* p, size_t n) {
  const __m512i by2048 = Broadcast(Fold(2048)), by512 = Broadcast(Fold(512));
  // The register so far is a part of the message: its first four bytes.
  const __m512i start =
      _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<long long>(crc));
  __m512i a = _mm512_xor_si512(Take<kCopy>(to, p, 0), start);
  __m512i b = Take<kCopy>(to, p, 64);
  __m512i c = Take<kCopy>(to, p, 128);
  __m512i d = Take<kCopy>(to, p, 192);
  for (size_t at = kFoldStep; at < n; at += kFoldStep) {
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
  crc = 0;
  for (size_t i = 0; i < sizeof rest; i += 8)
    crc = Step8(crc, Load64(rest + i));
  return crc;
}

uint32_t UpdateFolding(uint32_t crc, const unsigned char* p, size_t n) {
  // Below this the ends cost more than the middle saves.
  constexpr size_t kWorthIt = 512;
  if (n < kWorthIt) return UpdateInstruction(crc, p, n);
  const size_t whole = n / kFoldStep * kFoldStep;
  crc = FoldSteps<false>(crc, nullptr, p, whole);
  return UpdateInstruction(crc, p + whole, n - whole);
}

#endif  // TC_FOLD_TARGET

#if defined(__x86_64__)
// A copy alone.
uint32_t CopyLines(uint32_t, unsigned char* to, const unsigned char* p,
                   size_t n) {
  for (size_t at = 0; at < n; at += kLine) CopyLine(to + at, p + at);
  return 0;
}
#endif

// How to digest, and how to copy and digest n bytes where `to` begins a line
// and n is a multiple of `step`. Without `update` there is no digest.
struct Implementation {
  const char* name;  // null: no such entry
  Update update;
  Copy stream;  // null: none that is better than two passes over the cache
  size_t step;
};

#if defined(__x86_64__)
constexpr Implementation kNoDigest = {"copy", nullptr, CopyLines, kLine};
#else
constexpr Implementation kNoDigest = {"copy", nullptr, nullptr, 0};
#endif

// In blocks that the first cache holds. The digest is of the copy.
uint32_t CopyInBlocks(Update update, uint32_t crc, unsigned char* to,
                      const unsigned char* p, size_t n) {
  constexpr size_t kBlock = 8192;
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t size = std::min(n - at, kBlock);
    std::memcpy(to + at, p + at, size);
    if (update != nullptr) crc = update(crc, to + at, size);
  }
  return crc;
}

uint32_t CopyBy(const Implementation& by, uint32_t crc, unsigned char* to,
                const unsigned char* p, size_t n) {
  // Smaller ones are better left in the cache.
  constexpr size_t kWorthIt = 8192;
  size_t head = n, whole = 0;
  if (by.stream != nullptr && n >= kWorthIt) {
    head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    whole = (n - head) / by.step * by.step;
  }
  crc = CopyInBlocks(by.update, crc, to, p, head);
  if (whole == 0) {
    return CopyInBlocks(by.update, crc, to + head, p + head, n - head);
  }
  crc = by.stream(crc, to + head, p + head, whole);
#if defined(__x86_64__)
  _mm_sfence();  // streamed stores are ordered by nothing else
#endif
  head += whole;
  return CopyInBlocks(by.update, crc, to + head, p + head, n - head);
}

// What this CPU can run, the fastest first, the portable one last.
using Implementations = std::array<Implementation, 3>;
Implementations Detect() {
  Implementations found{};
  size_t count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool sse = __builtin_cpu_supports("sse4.2") != 0;
  if (sse && __builtin_cpu_supports("pclmul") &&
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("vpclmulqdq")) {
    found[count++] = {"vpclmulqdq", UpdateFolding, FoldSteps<true>, kFoldStep};
  }
  if (sse) {
    found[count++] = {"sse4.2", UpdateInstruction, CopyInstruction, kCopyStep};
  }
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0) {
    found[count++] = {"armv8-crc", UpdateInstruction, CopyInstruction,
                      kCopyStep};
  }
#endif
  found[count] = {"portable", UpdatePortable, nullptr, 0};
  return found;
}

const Implementations& Detected() {
  static const Implementations detected = Detect();
  return detected;
}

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes) {
  return ~Detected()[0].update(~crc, static_cast<const unsigned char*>(data),
                               bytes);
}

uint32_t Crc32cCopy(uint32_t crc, void* to, const void* from, size_t bytes) {
  return ~CopyBy(Detected()[0], ~crc, static_cast<unsigned char*>(to),
                 static_cast<const unsigned char*>(from), bytes);
}

void StreamCopy(void* to, const void* from, size_t bytes) {
  (void)CopyBy(kNoDigest, 0, static_cast<unsigned char*>(to),
               static_cast<const unsigned char*>(from), bytes);
}

uint32_t Crc32cCombine(uint32_t a, uint32_t b, uint64_t b_bytes) {
  for (size_t i = 0; b_bytes != 0; ++i, b_bytes >>= 1) {
    if ((b_bytes & 1) != 0) a = Multiply(kPowersOfX8[i], a);
  }
  return a ^ b;
}

std::optional<uint32_t> Crc32cBy(std::string_view implementation, uint32_t crc,
                                 const void* data, size_t bytes) {
  for (const Implementation& one : Detected()) {
    if (one.name == nullptr || implementation != one.name) continue;
    return ~one.update(~crc, static_cast<const unsigned char*>(data), bytes);
  }
  return std::nullopt;
}

std::optional<uint32_t> Crc32cCopyBy(std::string_view implementation,
                                     uint32_t crc, void* to, const void* from,
                                     size_t bytes) {
  for (const Implementation& one : Detected()) {
    if (one.name == nullptr || implementation != one.name) continue;
    return ~CopyBy(one, ~crc, static_cast<unsigned char*>(to),
                   static_cast<const unsigned char*>(from), bytes);
  }
  return std::nullopt;
}

const char* Crc32cImplementation() { return Detected()[0].name; }

}  // namespace torch_ckpt
