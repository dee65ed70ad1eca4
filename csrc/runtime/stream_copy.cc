#include "runtime/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torch_ckpt {

#if defined(__x86_64__)

void StreamCopy(std::byte* to, ByteSpan from) {
  // Smaller ones are better left in the cache.
  constexpr size_t kWorthIt = size_t{64} << 10, kLine = 64;
  if (from.size() < kWorthIt) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return;
  }
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from.data(), head);
  const std::byte* source = from.data() + head;
  to += head;
  const size_t whole = (from.size() - head) / kLine * kLine;
  for (size_t at = 0; at < whole; at += kLine) {
    const auto* p = reinterpret_cast<const __m128i*>(source + at);
    auto* q = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(p), b = _mm_loadu_si128(p + 1);
    const __m128i c = _mm_loadu_si128(p + 2), d = _mm_loadu_si128(p + 3);
    _mm_stream_si128(q, a);
    _mm_stream_si128(q + 1, b);
    _mm_stream_si128(q + 2, c);
    _mm_stream_si128(q + 3, d);
  }
  // Streamed stores are ordered by nothing else.
  _mm_sfence();
  std::memcpy(to + whole, source + whole, from.size() - head - whole);
}

#else

void StreamCopy(std::byte* to, ByteSpan from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

#endif

}  // namespace torch_ckpt
