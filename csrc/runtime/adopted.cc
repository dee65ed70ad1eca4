#include "runtime/adopted.h"

#include <algorithm>
#include <new>
#include <utility>

#include "os/fork.h"
#include "os/memory.h"

namespace torch_ckpt {
namespace {

// Ranges that stay mapped although nobody holds them: those of saves that
// overlap.
constexpr size_t kIdle = 4;

}  // namespace

AdoptedMemory& AdoptedMemory::Process() {
  static AdoptedMemory* const memory = new AdoptedMemory;
  return *memory;
}

Result<std::shared_ptr<std::byte>> AdoptedMemory::Adopt(int fd, uint64_t offset,
                                                        size_t bytes) {
  TC_RETURN_IF_ERROR(NotInForkedChild());
  TC_ASSIGN_OR_RETURN(const SharedRange range, FindShared(fd, offset, bytes));
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at =
      std::find_if(adopted_.begin(), adopted_.end(),
                   [&](const Adopted& other) { return other.range == range; });
  if (at != adopted_.end()) {
    std::rotate(at, at + 1, adopted_.end());
    return adopted_.back().data;
  }
  try {
    adopted_.reserve(adopted_.size() + 1);
    TC_ASSIGN_OR_RETURN(std::byte* const mapped, MapShared(fd, range));
    std::shared_ptr<std::byte> data(mapped, [bytes](std::byte* begin) {
      // A forked child has nothing there, or something else.
      if (!InForkedChild()) UnmapMemory(begin, bytes);
    });
    adopted_.push_back({range, data});
    Trim(kIdle);
    return data;
  } catch (const std::bad_alloc&) {
    return Exhausted("no memory for the note of what is adopted");
  }
}

bool AdoptedMemory::Holds(ByteSpan bytes) const {
  if (InForkedChild()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(adopted_.begin(), adopted_.end(), [&](const Adopted& one) {
    const std::byte* const begin = one.data.get();
    return one.held() && begin <= bytes.data() &&
           bytes.data() + bytes.size() <= begin + one.range.bytes;
  });
}

void AdoptedMemory::Trim() {
  if (InForkedChild()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Trim(0);
}

void AdoptedMemory::Trim(size_t keep) {
  // Nobody comes to hold one meanwhile: that takes the mutex.
  const auto idle =
      std::count_if(adopted_.begin(), adopted_.end(),
                    [](const Adopted& one) { return !one.held(); });
  auto surplus = static_cast<size_t>(idle) - std::min<size_t>(keep, idle);
  std::erase_if(adopted_, [&](const Adopted& one) {
    if (one.held() || surplus == 0) return false;
    --surplus;
    return true;
  });
}

}  // namespace torch_ckpt
