// CRC-32: x86-64 folds, 256 bytes a step where it has AVX-512 and VPCLMULQDQ,
// else 64; arm64 has instructions for it; other CPUs slice by 16.
#include "runtime/crc32.h"

#include <array>

#include "runtime/crc_fold.h"
#include "runtime/crc_instruction.h"
#include "runtime/crc_polynomial.h"

namespace torch_ckpt {
namespace {

using crc::kIeee;

struct IeeeUpdate {
  const char* name;  // null: no such entry
  crc::Update update;
};

// What this CPU can run, the fastest first, the portable one last.
using IeeeUpdates = std::array<IeeeUpdate, 3>;
IeeeUpdates DetectIeee() {
  IeeeUpdates found{};
  size_t count = 0;
  constexpr crc::Update kPortable = crc::UpdatePortable<kIeee>;
#if defined(__x86_64__)
  constexpr crc::Update kFolding = crc::UpdateFolding<kIeee, kPortable>;
  if (crc::CpuFoldsWide()) {
    found[count++] = {"vpclmulqdq", crc::UpdateFoldingWide<kIeee, kFolding>};
  }
  if (crc::CpuFolds()) found[count++] = {"pclmulqdq", kFolding};
#elif defined(__aarch64__)
  if (crc::CpuHasInstruction()) {
    found[count++] = {"armv8-crc", crc::UpdateInstruction<kIeee>};
  }
#endif
  found[count] = {"portable", kPortable};
  return found;
}

const IeeeUpdates& DetectedIeee() {
  static const IeeeUpdates detected = DetectIeee();
  return detected;
}

}  // namespace

uint32_t Crc32(uint32_t crc, const void* data, size_t bytes) {
  return ~DetectedIeee()[0].update(
      ~crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t Crc32Combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
  return crc::Combine<kIeee>(a, b, b_bytes);
}

const char* Crc32Implementation() { return DetectedIeee()[0].name; }

std::optional<uint32_t> Crc32By(std::string_view implementation, uint32_t crc,
                                const void* data, size_t bytes) {
  for (const IeeeUpdate& one : DetectedIeee()) {
    if (one.name == nullptr || implementation != one.name) continue;
    return ~one.update(~crc, static_cast<const unsigned char*>(data), bytes);
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
