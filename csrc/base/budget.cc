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
                   std::to_string(MostKept(bytes_) >> 20) +
                   " MiB: what is kept of it takes at most " +
                   std::to_string(kKeptPerByte) + " times its bytes and " +
                   std::to_string(kKeptAnyway >> 20) + " MiB");
}

}  // namespace torch_ckpt
