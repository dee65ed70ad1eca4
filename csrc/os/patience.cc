#include "os/patience.h"

#include <algorithm>
#include <thread>

#include "os/fault.h"

namespace torch_ckpt {

bool Patience::Wait() {
  constexpr std::chrono::milliseconds kLongest{500};
  if (Clock::now() + next_ > end_) return false;
  // A test that is its own clock has no time pass.
  if (FaultPoint("sleep", {}).skip) {
    end_ -= next_;
  } else {
    std::this_thread::sleep_for(next_);
  }
  next_ = std::min(2 * next_, kLongest);
  return true;
}

}  // namespace torch_ckpt
