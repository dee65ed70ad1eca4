// A tensor of files, as jobs read it: where its bytes are is found once, and a
// box or a range of it asks only for the boxes that it meets.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "format/ours/catalog.h"
#include "plan/runs.h"

namespace torch_ckpt {

// Bytes of a file. src: offset in the file; dst: whatever the job counts in.
struct StoredRun {
  uint32_t file;
  Run run;
};

class StoredView;
using StoredViewPtr = std::shared_ptr<const StoredView>;

// Const access is thread-safe.
class StoredView {
 public:
  // An archive as what it is in its file (never a kArchive), and its storage,
  // of crc32 0 where nothing is known of it.
  struct Resolved {
    Placement placement;
    DigestedRange storage;
  };
  // Looks into an archive. Called from any thread when the archive is first
  // met; an error is that of who asked, and the next one looks again.
  using Resolve = std::function<Result<Resolved>(const Placement& archive)>;
  // The storage that bytes from a place in a file on are in; crc32 0: unknown.
  using FindStorage = std::function<DigestedRange(uint32_t file, uint64_t at)>;

  // Of `entry`, whose owners among `placements` tile it. `resolve` may be empty
  // where none is a kArchive, `find_storage` where nothing is known of any.
  // Errors: those of InUnits (format/dtype.h).
  static Result<StoredViewPtr> Make(const CatalogEntry& entry,
                                    std::span<const Placement> placements,
                                    Resolve resolve = {},
                                    FindStorage find_storage = {});

  // Memory that it takes.
  uint64_t memory() const;

  // Its shape in units, and where its boxes are; of those in archives the ones
  // that runs were asked for.
  const Dims& shape_in_units() const { return whole_.shape; }
  int64_t unit_bytes() const { return whole_.unit_bytes; }
  struct StoredBox {
    uint32_t file;
    StridedBox box;
  };
  std::vector<StoredBox> Boxes() const;

  // Appends the runs that copy `to.box`, in units (format/dtype.h), and the
  // storages that they are in. They copy each unit once.
  Status RunsOfBox(const StridedBox& to, std::vector<StoredRun>* runs,
                   std::vector<DigestedRange>* storages) const;
  // The same of bytes [from, to) of the row-major tensor, to `dst` and behind
  // it. Edges may cut a unit.
  Status RunsOfBytes(uint64_t from, uint64_t to, uint64_t dst,
                     std::vector<StoredRun>* runs,
                     std::vector<DigestedRange>* storages) const;

 private:
  // A box with its bytes. Units are counted in the row-major order of the
  // tensor.
  struct PlacedBox {
    uint64_t base;  // file offset; of an archive its position in archives_
    int64_t first;  // unit
    int64_t past;   // behind the last unit of this and all before
    uint32_t file;
    bool archived;
  };
  struct Archive {
    Placement placement;
    std::optional<StridedBox> box;  // once it was looked into
    DigestedRange storage;
  };

  StoredView(const CatalogEntry& entry, UnitView whole)
      : name_(entry.name),
        dtype_(entry.dtype),
        shape_(entry.shape),
        whole_(std::move(whole)),
        strides_(DenseStrides(whole_.shape, 1)) {}

  int rank() const { return whole_.shape.size(); }
  StridedBox BoxOf(size_t at) const;
  Result<StridedBox> LookInto(size_t archive, DigestedRange* storage) const;
  // Those of boxes that lie in units [first, past).
  Status AddRuns(std::span<const StridedBox> wanted, int64_t first,
                 int64_t past, std::vector<StoredRun>* runs,
                 std::vector<DigestedRange>* storages) const;
  // Bytes [from, to) inside one unit.
  Status AddCutUnit(uint64_t from, uint64_t to, uint64_t dst,
                    std::vector<StoredRun>* runs,
                    std::vector<DigestedRange>* storages) const;

  const std::string name_;
  const Dtype dtype_;
  const Dims shape_;
  const UnitView whole_;
  const Dims strides_;            // of whole_, in units
  std::vector<PlacedBox> boxes_;  // by first
  // Of each box offsets, sizes and strides in bytes, as many of each as
  // whole_ has dimensions; an archive says other strides when it is looked
  // into. A Placement is five times as large.
  std::vector<int64_t> numbers_;
  Resolve resolve_;
  FindStorage find_storage_;
  mutable std::mutex mutex_;  // guards archives_
  mutable std::vector<Archive> archives_;
};

// The views of a checkpoint that were asked for last, by entry. Thread-safe.
class StoredViews {
 public:
  using Make = std::function<Result<StoredViewPtr>()>;

  // Calls `make` where it has none. Who asks for the same entry meanwhile waits
  // for it.
  Result<StoredViewPtr> Get(uint32_t entry, const Make& make);

 private:
  struct LateView {
    std::mutex making;
    StoredViewPtr view;
  };
  struct Kept {
    std::shared_ptr<LateView> late = std::make_shared<LateView>();
    uint64_t memory = 0;                  // of its view, once that is counted
    std::list<uint32_t>::iterator place;  // in recent_
  };

  std::shared_ptr<LateView> Use(uint32_t entry);
  void Count(uint32_t entry, const LateView* late, uint64_t memory);

  std::mutex mutex_;  // guards all but the late views
  std::unordered_map<uint32_t, Kept> kept_;
  std::list<uint32_t> recent_;  // most recently used first
  uint64_t memory_ = 0;
};

}  // namespace torch_ckpt
