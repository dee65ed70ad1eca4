// A placement of a catalog as the source of runs.
#pragma once

#include "format/catalog.h"
#include "plan/runs.h"

namespace torch_ckpt {

// The box in units (format/dtype.h) with the file offset of its first byte; in
// a file the bytes of a box are dense and in row-major order.
inline Result<StridedBox> StoredBox(const CatalogEntry& entry,
                                    const Placement& placement) {
  TC_ASSIGN_OR_RETURN(const UnitView view,
                      InUnits(entry.storage_dtype, entry.shape, placement.box));
  return StridedBox{view.box, placement.offset,
                    DenseStrides(view.box.sizes, view.unit_bytes)};
}

}  // namespace torch_ckpt
