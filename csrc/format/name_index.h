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
    if (cells_.empty()) return -1;
    const Cell& cell = cells_[Locate(Hash(name), name, name_at)];
    return cell.position == kFree ? -1 : static_cast<int64_t>(cell.position);
  }

  // The position of `name`: the one that it had already, else `position`.
  // REQUIRES: position < 2^32 - 1.
  template <class NameAt>
  uint32_t Insert(std::string_view name, uint32_t position,
                  const NameAt& name_at) {
    if (2 * (used_ + 1) > cells_.size()) Grow();
    const uint32_t hash = Hash(name);
    Cell& cell = cells_[Locate(hash, name, name_at)];
    if (cell.position == kFree) {
      cell = {hash, position};
      ++used_;
    }
    return cell.position;
  }

 private:
  static constexpr uint32_t kFree = UINT32_MAX;
  static constexpr size_t kFirstCells = 16;

  struct Cell {
    uint32_t hash = 0;
    uint32_t position = kFree;
  };

  static uint32_t Hash(std::string_view name);

  // The cell that holds `name`, or the free one where it belongs.
  template <class NameAt>
  size_t Locate(uint32_t hash, std::string_view name,
                const NameAt& name_at) const {
    const size_t mask = cells_.size() - 1;
    size_t at = hash & mask;
    while (cells_[at].position != kFree &&
           (cells_[at].hash != hash || name_at(cells_[at].position) != name)) {
      at = (at + 1) & mask;
    }
    return at;
  }

  void Grow() {
    std::vector<Cell> old(cells_.empty() ? kFirstCells : 2 * cells_.size());
    old.swap(cells_);
    const size_t mask = cells_.size() - 1;
    for (const Cell& cell : old) {
      if (cell.position == kFree) continue;
      size_t at = cell.hash & mask;
      while (cells_[at].position != kFree) at = (at + 1) & mask;
      cells_[at] = cell;
    }
  }

  std::vector<Cell> cells_;  // a power of two of them, at most half used
  size_t used_ = 0;
};

}  // namespace torch_ckpt
