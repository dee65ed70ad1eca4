// Memory of other processes: what they have leased as MemoryKind::kShared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "os/shared_memory.h"

namespace torch_ckpt {

// Maps such memory and keeps it mapped for whoever adopts it next, most likely
// for the next state of the same process: to touch a page for the first time
// costs as much as to write it. It takes no memory, so it has no budget; the
// process that leased it says how long the bytes stay what they are. All
// functions may be called from any thread. A forked child has none of it.
class AdoptedMemory {
 public:
  static AdoptedMemory& Process();  // never destroyed

  // The bytes, mapped as long as anybody holds them, and longer. `fd` may be
  // closed. Whoever adopts the same bytes has the same mapping.
  // kInvalidArgument for anything but a range of such memory.
  Result<std::shared_ptr<std::byte>> Adopt(int fd, uint64_t offset,
                                           size_t bytes);
  // Whether somebody holds a range that has all of these bytes.
  bool Holds(ByteSpan bytes) const;
  // Unmaps what nobody holds.
  void Trim();

 private:
  struct Adopted {
    SharedRange range;
    std::shared_ptr<std::byte> data;
    bool held() const { return data.use_count() > 1; }
  };
  void Trim(size_t keep);  // REQUIRES: mutex_ is held

  mutable std::mutex mutex_;
  std::vector<Adopted> adopted_;  // what was adopted last is last
};

}  // namespace torch_ckpt
