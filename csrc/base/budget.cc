#include "base/budget.h"

#include <string>

namespace torch_ckpt {

Status Budget::Over() const {
  const std::string read =
      std::string(what_) + " of " + std::to_string(bytes_) + " bytes ";
  if (steps_ == MostSteps()) {
    return Exhausted(read +
                     "takes more work than so many bytes account for: it says "
                     "the same in very many places");
  }
  return Exhausted(read + "says more than fits into " +
                   std::to_string(most_kept_ >> 20) +
                   " MiB, which is all that is kept of so many bytes: it says "
                   "the same in very many places");
}

}  // namespace torch_ckpt
