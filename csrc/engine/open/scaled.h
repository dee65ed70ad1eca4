// Codes and scales of a catalog as tensors of numbers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"
#include "format/ours/catalog.h"
#include "format/ours/manifest.h"

namespace torch_ckpt {

// How the numbers of a tensor are made: its elements are codes.
struct ScaledTensor {
  std::string codes, scales;  // what they are called in the files
  Dtype scale_dtype = Dtype::kF32;
  Dims stored;  // shape of the tensor of scales
  Dims blocks;  // elements that share a scale, in each dimension:
                // values/scaled.h
};

struct ScaledCatalog {
  // With a tensor of codes, F8_E4M3, F8_E5M2 or F4, in place of each pair. One
  // of MXFP4 that is stored as bytes, as x_blocks with x_scales, is called x.
  Catalog catalog;
  std::map<std::string, ScaledTensor, std::less<>> scaled;  // by name
  // Codes without scales, and scales without codes: whether these are errors is
  // what the configuration beside them says.
  std::vector<std::string> unscaled, orphans;
  // Codes that scales belong to and do not fit, which stay what they are: an
  // error for who wants numbers of them.
  struct Misfit {
    std::string codes, scales, reason;
  };
  std::vector<Misfit> misfits;
};

struct ScaleOptions {
  // Of the last two dimensions of float8 codes whose scales are a grid; what
  // the configuration says, else nothing, which is 128 x 128. Grids of one
  // scale for 32 codes of a row are known by their shape and dtype.
  std::optional<Dims> blocks;
  // The codes to pair, by their names in `catalog`; nullopt: all.
  std::optional<std::set<std::string, std::less<>>> only;
  bool keeps_scales = false;  // as tensors of their own
  bool keeps_names = false;   // x_blocks stays x_blocks
};

// Of the tensor of scales as it is stored the box that `held`, of a
// values/scaled.h, is.
Box StoredScales(const ScaledTensor& scaled, const Box& held);

// The tensors that scale `codes`, a tensor of `catalog`, if it is one of codes:
// by their names alone.
std::vector<std::string> ScalesOf(const Catalog& catalog,
                                  const CatalogEntry& codes);

// Pairs codes with their scales. A pure function of names, dtypes and shapes.
// kUnsupported names codes in `only` whose scales do not fit, or are two, with
// both shapes; kInvalidArgument such that have none.
Result<ScaledCatalog> PairScales(const Catalog& catalog,
                                 std::span<const ManifestFile> files,
                                 const ScaleOptions& options);

}  // namespace torch_ckpt
