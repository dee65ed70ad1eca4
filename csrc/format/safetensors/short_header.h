// The header of a data file, parsed, and its short form: what a rank leaves
// beside a file of ours in staging, so that the commit need not parse the JSON
// of every rank again. The JSON decides: the short form carries the digest of
// the text that it was made with, and counts for no other.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "format/safetensors/safetensors.h"
#include "format/safetensors/sharding_info.h"

namespace torch_ckpt {

struct FileHeader {
  SafetensorsHeader header;
  ShardingInfo sharding;
};

struct ShortHeader {
  FileHeader file;  // without header.metadata
  uint32_t text_crc32c = 0;
};

// `text_crc32c` is of what BuildSafetensorsHeader made. Every shard of `file`
// has its global shape.
std::string EncodeShortHeader(const FileHeader& file, uint32_t text_crc32c);

// Bounded memory, whatever the bytes are. Checks the sizes and the box of every
// tensor as the parsers of the JSON do; the names were checked when the text
// was built, and it is for the caller to know that it is that text.
Result<ShortHeader> DecodeShortHeader(ByteSpan bytes);

}  // namespace torch_ckpt
