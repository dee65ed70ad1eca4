// From a name to its position in a list that somebody else keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace torch_ckpt {

// A hash table of positions, open-addressed: no allocation a name and no copy
// of one, since a checkpoint has hundreds of thousands. Names come from files,
// so the hash has a key that only this process knows: nobody can choose names
// that collide. `name_at(position)` is the list's name at a position that was
// inserted.
class NameIndex {
 public:
  // The position of `name`, or -1.
  template <class NameAt>
  int64_t Find(std::string_view name, const NameAt& name_at) const {
    if (slots_.empty()) return -1;
    const Slot& slot = slots_[Locate(Hash(name), name, name_at)];
    return slot.position == kFree ? -1 : static_cast<int64_t>(slot.position);
  }

  // The position of `name`: the one that it had already, else `position`.
  // REQUIRES: position < 2^32 - 1.
  template <class NameAt>
  uint32_t Insert(std::string_view name, uint32_t position,
                  const NameAt& name_at) {
    if (2 * (used_ + 1) > slots_.size()) Grow();
    const uint32_t hash = Hash(name);
    Slot& slot = slots_[Locate(hash, name, name_at)];
    if (slot.position == kFree) {
      slot = {hash, position};
      ++used_;
    }
    return slot.position;
  }

 private:
  static constexpr uint32_t kFree = UINT32_MAX;
  static constexpr size_t kFirstSlots = 16;

  struct Slot {
    uint32_t hash = 0;
    uint32_t position = kFree;
  };

  static uint32_t Hash(std::string_view name);

  // The slot that holds `name`, or the free one where it belongs.
  template <class NameAt>
  size_t Locate(uint32_t hash, std::string_view name,
                const NameAt& name_at) const {
    const size_t mask = slots_.size() - 1;
    size_t at = hash & mask;
    while (slots_[at].position != kFree &&
           (slots_[at].hash != hash || name_at(slots_[at].position) != name)) {
      at = (at + 1) & mask;
    }
    return at;
  }

  void Grow() {
    std::vector<Slot> old(slots_.empty() ? kFirstSlots : 2 * slots_.size());
    old.swap(slots_);
    const size_t mask = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.position == kFree) continue;
      size_t at = slot.hash & mask;
      while (slots_[at].position != kFree) at = (at + 1) & mask;
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two of them, at most half used
  size_t used_ = 0;
};

}  // namespace torch_ckpt
