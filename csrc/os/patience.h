// How long to look again before what is seen is believed.
//
// Clients of network file systems answer from caches: for seconds after a
// change on another node a name may be missing, or stand for a file that is
// gone (ESTALE), or a file may have its old size and bytes.
#pragma once

#include <chrono>

namespace torch_ckpt {

// Most such caches hold for a second, NFS's for three and more.
inline constexpr std::chrono::milliseconds kPatience{5000};
// That a name was there sshfs remembers for 20 s. Only for what nobody waits
// for in vain: a name that is to be made.
inline constexpr std::chrono::milliseconds kNamePatience{30000};

// One thread at a time.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds total)
      : end_(Clock::now() + total) {}
  // Sleeps, longer each time, and says true; or says false, at once, when the
  // next sleep would end after the total.
  bool Wait();

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
  std::chrono::milliseconds next_{10};
};

}  // namespace torch_ckpt
