// What reading the bytes of a stranger may take.
//
// A small file can say the same thing in very many places, and each place costs
// what the thing costs. So whoever follows what bytes say charges each value
// and each text that is *touched*, and each byte that is kept, to a Budget that
// was made of the number of bytes read: time and memory then grow with the
// file, whatever it says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace torch_ckpt {

// Not thread-safe. Once it is over it stays over.
class Budget {
 public:
  static constexpr uint64_t kStepsAnyway = uint64_t{1} << 23;
  static constexpr uint64_t kStepsPerByte = 8;
  // As much text is touched in one step: about as fast as a value is.
  static constexpr uint64_t kTextPerStep = 64;
  // For small files that are what they seem; so little that nobody feels it.
  static constexpr uint64_t kKeptAnyway = uint64_t{16} << 20;
  static constexpr uint64_t kKeptPerByte = 16;
  // Of files above 256 MiB four times their bytes: what stock DCP saves of
  // 10,000 tensors on 256 ranks, a .metadata of 417 MB, takes 1.12 GB to parse,
  // 2.7 bytes a byte, and is to be read.
  static constexpr uint64_t kMostKept = uint64_t{1} << 30;

  // `what` was read, and has `bytes`; a literal, for messages. `kept_anyway`:
  // for what does not come of these bytes alone.
  Budget(std::string_view what, uint64_t bytes,
         uint64_t kept_anyway = kKeptAnyway)
      : what_(what),
        bytes_(bytes),
        most_kept_(MostKept(bytes, kept_anyway)),
        kept_left_(most_kept_) {}

  // What may be kept of `bytes` that were read.
  static constexpr uint64_t MostKept(uint64_t bytes,
                                     uint64_t kept_anyway = kKeptAnyway) {
    return std::min(kept_anyway + kKeptPerByte * bytes,
                    std::max(kMostKept, 4 * bytes));
  }

  // Each charges, and is false where that was too much. Then Over() says so.
  [[nodiscard]] bool Step(uint64_t steps = 1) {
    if (steps > MostSteps() - steps_) {
      steps_ = MostSteps();
      is_over_ = true;
    } else {
      steps_ += steps;
    }
    return !is_over_;
  }
  // A value, and the text that it has.
  [[nodiscard]] bool Touch(uint64_t text_bytes) {
    return Step(1 + text_bytes / kTextPerStep);
  }
  [[nodiscard]] bool Keep(uint64_t bytes) {
    if (bytes > kept_left_) {
      is_over_ = true;
    } else {
      kept_left_ -= bytes;
    }
    return !is_over_;
  }

  uint64_t bytes() const { return bytes_; }
  uint64_t most_kept() const { return most_kept_; }
  uint64_t kept_left() const { return kept_left_; }
  // Charged so far: the same on every machine.
  uint64_t steps() const { return steps_; }
  // kExhausted.
  Status Over() const;

 private:
  uint64_t MostSteps() const { return kStepsAnyway + kStepsPerByte * bytes_; }

  std::string_view what_;
  uint64_t bytes_;
  uint64_t steps_ = 0;
  uint64_t most_kept_, kept_left_;
  bool is_over_ = false;
};

}  // namespace torch_ckpt
