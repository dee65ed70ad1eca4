// The safetensors container: header parsing (strict, for untrusted bytes) and
// header building (for our own files). Pure functions on bytes; no I/O.
//
//   file   = u64le header_bytes, header, data
//   header = JSON object {"__metadata__": {string: string}, name: entry, ...}
//            padded at the end with spaces
//   entry  = {"dtype": string, "shape": [int], "data_offsets": [begin, end]}
//
// The data ranges tile the data area exactly. docs/format.md lists every rule.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/dtype.h"

namespace torch_ckpt {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // safetensors' cap
inline constexpr uint64_t kMaxTensorsPerFile = 10'000'000;
inline constexpr uint64_t kMaxMetadataEntries = 1'000'000;
inline constexpr uint64_t kDataAlignment = 4096;

struct SafetensorsEntry {
  std::string name;
  Dtype dtype;
  Dims shape;
  uint64_t begin = 0;  // relative to the data area
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<std::pair<std::string, std::string>> metadata;  // in file order
  // By begin, then end (so an empty tensor comes before the one that starts at
  // its place), then order in the header.
  std::vector<SafetensorsEntry> tensors;
  uint64_t data_begin = 0;  // of the data area, from the start of the file
  uint64_t file_bytes = 0;

  const std::string* FindMetadata(std::string_view key) const;
};

// The length of the header that the first 8 bytes of a file of `file_bytes`
// announce, checked against the file and the cap. Read exactly that many bytes
// next; nothing larger than the file is ever allocated.
Result<uint64_t> ParseHeaderLength(ByteSpan first8, uint64_t file_bytes);

// Enforces every rule of docs/format.md. Errors are kCorrupt (or kUnsupported
// for more than kMaxDims dimensions or another limit of ours) and name the
// tensor; the caller adds the file. Memory is bounded by a small multiple of
// header.size().
Result<SafetensorsHeader> ParseSafetensorsHeader(ByteSpan header,
                                                 uint64_t file_bytes);

// Builds the first bytes of a file (length field, JSON, padding) so that data
// starts at a multiple of kDataAlignment. `metadata` keeps its order and comes
// first in the JSON. `tensors` must tile [0, data bytes) in the order given;
// that, their sizes and all names are checked (kInvalidArgument).
// kUnsupported when the header would exceed kMaxHeaderBytes.
Result<std::string> BuildSafetensorsHeader(
    const std::vector<std::pair<std::string, std::string>>& metadata,
    const std::vector<SafetensorsEntry>& tensors);

}  // namespace torch_ckpt
