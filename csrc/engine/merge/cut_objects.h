// Objects files of which some leaves do not go along.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torch_ckpt {

// The text of an objects file (docs/format.md, section 7) with those leaves of
// `text` that `keeps` says; their values stay as they are, byte for byte.
struct CutText {
  std::string text;
  bool any = false;    // leaf is left
  bool sides = false;  // the side file is needed, and is to be whole
};
// kCorrupt for what is no such text. REQUIRES: `text` outlives the call.
Result<CutText> CutObjects(
    std::string_view text,
    const std::function<bool(std::string_view name)>& keeps);

}  // namespace torch_ckpt
