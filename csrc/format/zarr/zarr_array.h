// .zarray of zarr version 2, as Megatron Core's old backend writes it: the
// shape of a tensor, and of the chunks that it is stored in, a file each.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"

namespace torch_ckpt {

inline constexpr std::string_view kZarrArrayName = ".zarray";
inline constexpr uint64_t kMaxZarrArrayBytes = uint64_t{1} << 20;

struct ZarrArray {
  Dims shape, chunks;  // of one length; chunks are not 0
  Dtype dtype = Dtype::kU8;
  // What torch calls a dtype that safetensors has no name for; then `dtype` is
  // not meant.
  std::string other_dtype;
};

// Strict: kCorrupt for what is no such text, kUnsupported for one of bytes in
// another form than rows of plain elements in little-endian order (compressed,
// filtered, Fortran's order), and for keys that are not known.
Result<ZarrArray> ParseZarrArray(std::string_view text);

// The chunk that a file is called after: "2.0.1", of as many dimensions as
// there are; "0" where there are none. nullopt for another name.
std::optional<Dims> ParseZarrChunkName(std::string_view name, int dims);
bool IsZarrChunkName(std::string_view name);  // of any number of dimensions
std::string ZarrChunkName(std::span<const int64_t> chunk);

}  // namespace torch_ckpt
