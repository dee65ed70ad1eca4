// CRC-32C and copies with it.
//
//   portable   slicing by 16
//   x86-64     the crc32 instruction on three streams at once; with AVX-512 and
//              VPCLMULQDQ folding of 256 bytes a step
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

#include "runtime/crc_fold.h"
#include "runtime/crc_instruction.h"
#include "runtime/crc_polynomial.h"

namespace torch_ckpt {
namespace {

using crc::kCastagnoli;
using crc::Update;

constexpr size_t kLine = 64;  // of the caches

// All the functions below work on the register, not inverted.
using Copy = uint32_t (*)(uint32_t, unsigned char*, const unsigned char*,
                          size_t);

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

// A copy alone.
uint32_t CopyLines(uint32_t, unsigned char* to, const unsigned char* p,
                   size_t n) {
  for (size_t at = 0; at < n; at += kLine) CopyLine(to + at, p + at);
  return 0;
}

TC_CRC_TARGET inline uint32_t StepLine(uint32_t crc, const Line& line) {
  for (const __m128i& part : line.parts) {
    crc = crc::Step8<kCastagnoli>(
        crc, static_cast<uint64_t>(_mm_cvtsi128_si64(part)));
    crc = crc::Step8<kCastagnoli>(
        crc, static_cast<uint64_t>(_mm_extract_epi64(part, 1)));
  }
  return crc;
}

// What is there, and past the end what is there or not.
inline void Prefetch(const unsigned char* p, size_t ahead) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p) + ahead;
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

constexpr size_t kStream = crc::kShort, kCopyStep = 3 * kStream;

// Three streams too, but by whole lines: the buffers that combine stores past
// the caches are few, and a line that leaves them in parts costs as much as
// many (AMD Zen 3: 0.6 GB/s by 8 bytes, 12 by lines, where memcpy has 15).
// Short streams, because lines 4 KiB apart are in each other's way there (2.8).
TC_CRC_TARGET uint32_t CopyInstruction(uint32_t crc, unsigned char* to,
                                       const unsigned char* p, size_t n) {
  constexpr size_t kAhead = 2 * kCopyStep;
  for (size_t block = 0; block < n; block += kCopyStep) {
    uint32_t second = 0, third = 0;
    for (size_t at = block; at < block + kStream; at += kLine) {
      for (size_t i = 0; i < 3; ++i) Prefetch(p + at, i * kStream + kAhead);
      const auto copy = [&](size_t stream) {
        return CopyLine(to + at + stream * kStream, p + at + stream * kStream);
      };
      crc = StepLine(crc, copy(0));
      second = StepLine(second, copy(1));
      third = StepLine(third, copy(2));
    }
    crc = crc::Join<kCastagnoli, kStream>(crc, second, third);
  }
  return crc;
}
#elif defined(__aarch64__)
constexpr size_t kCopyStep = 3 * crc::kLong;

TC_CRC_TARGET uint32_t CopyInstruction(uint32_t crc, unsigned char* to,
                                       const unsigned char* p, size_t n) {
  return crc::ThreeStreams<kCastagnoli, crc::kLong, true>(crc, to, p, n);
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
  constexpr Update kRest = crc::UpdateOneStream<kCastagnoli>;
  if (crc::CpuHasInstruction() && crc::CpuFoldsWide()) {
    found[count++] = {"vpclmulqdq", crc::UpdateFoldingWide<kCastagnoli, kRest>,
                      crc::WideSteps<kCastagnoli, kRest, true>, crc::kWideStep};
  }
  if (crc::CpuHasInstruction()) {
    found[count++] = {"sse4.2", crc::UpdateInstruction<kCastagnoli>,
                      CopyInstruction, kCopyStep};
  }
#elif defined(__aarch64__)
  if (crc::CpuHasInstruction()) {
    found[count++] = {"armv8-crc", crc::UpdateInstruction<kCastagnoli>,
                      CopyInstruction, kCopyStep};
  }
#endif
  found[count] = {"portable", crc::UpdatePortable<kCastagnoli>, nullptr, 0};
  return found;
}

const Implementations& Detected() {
  static const Implementations detected = Detect();
  return detected;
}

// Null where this CPU does not have it.
const Implementation* Find(std::string_view name) {
  for (const Implementation& one : Detected()) {
    if (one.name != nullptr && one.name == name) return &one;
  }
  return nullptr;
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
  return crc::Combine<kCastagnoli>(a, b, b_bytes);
}

std::optional<uint32_t> Crc32cBy(std::string_view implementation, uint32_t crc,
                                 const void* data, size_t bytes) {
  const Implementation* const by = Find(implementation);
  if (by == nullptr) return std::nullopt;
  return ~by->update(~crc, static_cast<const unsigned char*>(data), bytes);
}

std::optional<uint32_t> Crc32cCopyBy(std::string_view implementation,
                                     uint32_t crc, void* to, const void* from,
                                     size_t bytes) {
  const Implementation* const by = Find(implementation);
  if (by == nullptr) return std::nullopt;
  return ~CopyBy(*by, ~crc, static_cast<unsigned char*>(to),
                 static_cast<const unsigned char*>(from), bytes);
}

const char* Crc32cImplementation() { return Detected()[0].name; }

}  // namespace torch_ckpt
