// What ranks have written: said by the op that writes, brought together by
// Python, read at the commit.
#pragma once

#include <vector>

#include "engine/commit/commit.h"
#include "engine/save/assemble_job.h"
#include "engine/save/write_job.h"
#include "json/fields.h"

namespace torch_ckpt {

// A file: {"staged", "name", "id", "role", "bytes", "crc32c"}
Json FileJson(const StagedFile& file);
Result<StagedFile> ParseFile(const Json& object);

// Ranges of a file: [[begin, end, digests], ...]
Json RangesJson(const std::vector<WrittenRange>& ranges);
Result<std::vector<WrittenRange>> ParseRanges(const Json& ranges);

// Of final files, by one call of one rank: {"files": [{"file", "id", "ranges"},
// ...], "spill": spill or null, "ring_bytes": int}
Json FinalsJson(const WrittenPlan& written);
// By all calls of one rank: {"rank": int, "calls": [what FinalsJson makes]}
Result<RankFinals> ParseFinals(const Json& object);

}  // namespace torch_ckpt
