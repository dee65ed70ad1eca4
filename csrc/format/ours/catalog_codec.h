// What the encoder and the decoders of the catalog share: numbers of the
// format, and placements as bytes (docs/format.md, section 6). For format/
// only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "format/binary.h"
#include "format/ours/catalog.h"

namespace torch_ckpt::internal {

inline constexpr std::string_view kCatalogMagic = "TCKPTCAT";
inline constexpr char kCatalogVersion = 2;
// The magic, the version, the number of entries.
inline constexpr size_t kCatalogHead = kCatalogMagic.size() + 1 + 4;

// The kind of a placement in the file. Those that are to come have numbers, so
// that a reader of today names what it cannot read.
enum class StoredKind : uint8_t {
  kWhole = 0,  // a box: the whole tensor
  kBox = 1,
  kStridedBox = 2,
  kRange = 3,
  kFill = 4,  // no bytes: a value
  kRule = 5,  // of a device mesh
  kArchive = 6,
};
// A placement begins with its kind, times 4, and these.
inline constexpr uint64_t kReplicaBit = 1;
inline constexpr uint64_t kFieldsBit = 2;

// Optional fields: tag, length, bytes; at the end a tag of 0. A tag is the
// field's number, times 2, and this bit where a reader that does not know the
// field must refuse the entry.
inline constexpr uint64_t kCriticalBit = 1;
enum class EntryField : uint64_t { kPath = 1, kArchive = 2 };
// Of placements: 1 is to be the hash of the content (128 bits).

inline Status Malformed(std::string_view what) {
  return Corrupt("the catalog is damaged: " + std::string(what));
}

void PutPlacement(std::string* out, const Placement& placement,
                  const Dims& shape);
// Checks what can be seen without the files: that it is inside `shape`, and in
// its shortest spelling.
Result<Placement> GetPlacement(BinaryReader* in, Dtype dtype,
                               const Dims& shape);

// Hands each field to on_field(number, bytes), which says whether it knows it.
// kUnsupported for one that is critical and not known.
template <class Fn>
Status GetFields(BinaryReader* in, const Fn& on_field) {
  uint64_t last = 0;
  for (;;) {
    const auto tag = in->Varint();
    if (!tag) return Malformed("a field");
    if (*tag == 0) return {};
    const uint64_t number = *tag >> 1;
    const auto bytes = in->View(in->left());
    if (!bytes || number <= last) return Malformed("a field");
    last = number;
    if (!on_field(number, *bytes) && (*tag & kCriticalBit)) {
      return Unsupported("has the field " + std::to_string(number) +
                         ", which this torch_ckpt does not know and must not "
                         "pass over: written by a newer one");
    }
  }
}

// A state-dict path: a JSON array of one or more strings and integers, without
// white space.
bool IsPath(std::string_view text);

// Bytes that a placement takes in its file from `offset` on, all gaps of its
// strides included; an error where that is no number of whole bytes.
Result<uint64_t> PlacementBytes(const Placement& placement, Dtype dtype,
                                const Dims& shape);

}  // namespace torch_ckpt::internal
