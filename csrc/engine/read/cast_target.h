// Memory whose elements are cast from stored ones as they arrive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/read/stored_places.h"
#include "plan/runs.h"
#include "values/cast.h"

namespace torch_ckpt {

// Where the elements of a box are that cuts a unit of codes: with all units
// that it touches in memory of their own first.
struct Detour {
  std::vector<std::byte> memory;
  Run home;  // from there to the target, by their first elements
};

// How codes become numbers in the memory.
struct CodesTarget {
  std::shared_ptr<const Scales> scales;
  StoredPlaces places;  // of the bytes of files
  std::optional<Detour> detour;
  // Bytes from one element of a unit to the next in the memory: runs count in
  // elements of it then, and not in units.
  std::optional<int64_t> spread;
};

class CastTarget {
 public:
  // Errors name `fqn`. `data` is the first element. Without `codes` REQUIRES:
  // CanCast(from, to); with them CanScale, and scales that are filled before
  // anything is delivered.
  CastTarget(std::string fqn, std::byte* data, Dtype from, Dtype to,
             std::unique_ptr<const CodesTarget> codes = nullptr);

  // Casts the elements of `run` of `file`, whose source begins at `bytes`; its
  // `dst` is where they would be if the memory, from 0 on, had elements of
  // `from`. Returns how many were lost, see CastElements. Of an element that
  // the run begins or ends in, the bytes are kept until Finish. What is
  // delivered again takes the place of what was. Thread-safe for runs that
  // share no byte.
  uint64_t Deliver(uint32_t file, const Run& run, const std::byte* bytes);
  void AddLost(uint64_t count) { converter_.AddLost(count); }

  // When all is delivered: casts what was kept. kInvalidArgument if values are
  // lost.
  Status Finish();

 private:
  // Units of a file, one after another, and where they are.
  struct Stored {
    uint32_t file;
    uint64_t offset;
    const std::byte* bytes;

    Stored After(uint64_t count) const {
      return {file, offset + count, bytes + count};
    }
  };

  uint64_t DeliverBytes(uint64_t dst, const Stored& from, uint64_t count);
  uint64_t DeliverLoops(uint32_t file, const Run& run, const std::byte* bytes);
  // As many elements as a step holds at most.
  uint64_t DeliverBlock(uint32_t file, const Run& run, const std::byte* bytes);
  // Of a scatter of `units` in a row, the elements of each apart.
  void SpreadUnits(uint64_t units, Run* scatter) const;
  // All rows of a run, one after another.
  uint64_t ConvertRows(const Run& run, int level, const Stored& from,
                       std::byte** out) const;
  uint64_t Convert(const Stored& from, std::byte* out, uint64_t units) const;
  // Bytes of one element, not all.
  void Keep(uint64_t dst, const std::byte* bytes, uint64_t count);
  uint64_t Cast(uint64_t unit, const Stored& from, uint64_t count);
  // Where in the memory byte `dst` of elements of `from` is.
  int64_t InTarget(int64_t dst) const {
    if (codes_ && codes_->spread) return dst * element_bytes_;
    return dst / static_cast<int64_t>(converter_.from_bytes()) *
           static_cast<int64_t>(converter_.to_bytes());
  }

  const std::unique_ptr<const CodesTarget> codes_;
  std::byte* const home_;  // where the caller wants them
  std::byte* const data_;  // and where they are cast to
  Converter converter_;
  const int64_t unit_, element_bytes_;  // elements, and bytes of one once cast
  const uint64_t step_units_;           // that are cast at once
  std::mutex mutex_;
  // Elements that are cut, by number; guarded by mutex_.
  std::map<uint64_t, std::array<std::byte, 8>> kept_;
};

}  // namespace torch_ckpt
