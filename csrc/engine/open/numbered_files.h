// Files that say of which set they are: "<stem>-00001-of-00002<suffix>".
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torch_ckpt {

// Ok where of every set that `names` are of all files are among them, whichever
// ranks have written them. kIncomplete names one that is missing.
Status CheckNumbers(std::span<const std::string> names,
                    std::string_view suffix);

}  // namespace torch_ckpt
