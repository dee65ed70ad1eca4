#include "os/random.h"

#include <unistd.h>

#include <algorithm>
#include <random>

namespace torch_ckpt {

void FillRandom(MutableByteSpan out) {
  if (getentropy(out.data(), out.size()) == 0) return;
  std::random_device device;
  for (size_t i = 0; i < out.size(); i += sizeof(unsigned)) {
    const unsigned word = device();
    std::memcpy(out.data() + i, &word, std::min(sizeof word, out.size() - i));
  }
}

}  // namespace torch_ckpt
