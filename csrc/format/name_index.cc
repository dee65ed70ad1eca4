#include "format/name_index.h"

#include <array>
#include <span>

#include "base/siphash.h"
#include "os/random.h"

namespace torch_ckpt {

uint32_t NameIndex::Hash(std::string_view name) {
  static const std::array<uint64_t, 2> key = [] {
    std::array<uint64_t, 2> random;
    FillRandom(std::as_writable_bytes(std::span(random)));
    return random;
  }();
  return static_cast<uint32_t>(SipHash(key, name));
}

}  // namespace torch_ckpt
