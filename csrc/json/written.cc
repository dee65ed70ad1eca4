#include "json/written.h"

#include <utility>

#include "format/names.h"

namespace torch_ckpt {
namespace {

Result<WrittenSpill> ParseSpill(const Json& item) {
  WrittenSpill spill;
  StagedFile& file = spill.file;
  TC_ASSIGN_OR_RETURN(file.staged, GetString(item, "staged"));
  TC_ASSIGN_OR_RETURN(file.id, GetString(item, "id"));
  TC_ASSIGN_OR_RETURN(const int64_t bytes, GetInt(item, "bytes"));
  file.bytes = static_cast<uint64_t>(bytes);
  TC_RETURN_IF_ERROR(CheckFileName(file.staged));
  TC_ASSIGN_OR_RETURN(const std::string crc, GetString(item, "crc32c"));
  TC_ASSIGN_OR_RETURN(file.crc32c, ParseDigests(crc));
  if (file.crc32c.size() != SegmentCount({0, file.bytes})) {
    return InvalidArgument("a rank's spill has too few digests");
  }
  TC_ASSIGN_OR_RETURN(const Json* pieces, GetList(item, "pieces"));
  for (const Json& piece : *pieces) {
    if (!piece.is_array() || piece.size() != 4) {
      return InvalidArgument("a piece is a file, begin, end and place");
    }
    TC_ASSIGN_OR_RETURN(const uint64_t final_file, ParseUnsigned(piece[0]));
    SpillBytes left;
    left.file = static_cast<uint32_t>(final_file);
    TC_ASSIGN_OR_RETURN(left.bytes.begin, ParseUnsigned(piece[1]));
    TC_ASSIGN_OR_RETURN(left.bytes.end, ParseUnsigned(piece[2]));
    TC_ASSIGN_OR_RETURN(left.at, ParseUnsigned(piece[3]));
    spill.bytes.push_back(left);
  }
  TC_ASSIGN_OR_RETURN(const Json* boxes, GetList(item, "boxes"));
  for (const Json& box : *boxes) {
    if (!box.is_array() || box.size() != 4 || !box[0].is_string()) {
      return InvalidArgument("a box is a name, offsets, sizes and place");
    }
    SpillBox left;
    left.tensor = box[0].get<std::string>();
    TC_ASSIGN_OR_RETURN(left.box.offsets, ParseDims(box[1]));
    TC_ASSIGN_OR_RETURN(left.box.sizes, ParseDims(box[2]));
    TC_ASSIGN_OR_RETURN(left.at, ParseUnsigned(box[3]));
    spill.boxes.push_back(std::move(left));
  }
  return spill;
}

Json SpillJson(const WrittenSpill& spill) {
  const StagedFile& file = spill.file;
  Json pieces = Json::array(), boxes = Json::array();
  for (const SpillBytes& piece : spill.bytes) {
    pieces.push_back(
        {piece.file, piece.bytes.begin, piece.bytes.end, piece.at});
  }
  for (const SpillBox& box : spill.boxes) {
    boxes.push_back({box.tensor, DimsJson(box.box.offsets),
                     DimsJson(box.box.sizes), box.at});
  }
  return {{"staged", file.staged},       {"id", file.id},
          {"bytes", file.bytes},         {"crc32c", DigestsText(file.crc32c)},
          {"pieces", std::move(pieces)}, {"boxes", std::move(boxes)}};
}

}  // namespace

Json FileJson(const StagedFile& file) {
  return {{"staged", file.staged}, {"name", file.name},
          {"id", file.id},         {"role", RoleName(file.role)},
          {"bytes", file.bytes},   {"crc32c", DigestsText(file.crc32c)}};
}

Result<StagedFile> ParseFile(const Json& item) {
  StagedFile file;
  TC_ASSIGN_OR_RETURN(file.staged, GetString(item, "staged"));
  TC_ASSIGN_OR_RETURN(file.name, GetString(item, "name"));
  TC_ASSIGN_OR_RETURN(file.id, GetString(item, "id"));
  TC_ASSIGN_OR_RETURN(file.role, GetRole(item));
  file.container = ContainerOf(file.role);
  TC_ASSIGN_OR_RETURN(const int64_t bytes, GetInt(item, "bytes"));
  file.bytes = static_cast<uint64_t>(bytes);
  TC_ASSIGN_OR_RETURN(const std::string crc, GetString(item, "crc32c"));
  TC_ASSIGN_OR_RETURN(file.crc32c, ParseDigests(crc));
  return file;
}

Json RangesJson(const std::vector<WrittenRange>& ranges) {
  Json out = Json::array();
  for (const WrittenRange& range : ranges) {
    out.push_back(
        {range.bytes.begin, range.bytes.end, DigestsText(range.crc32c)});
  }
  return out;
}

Result<std::vector<WrittenRange>> ParseRanges(const Json& ranges) {
  std::vector<WrittenRange> written;
  for (const Json& item : ranges) {
    if (!item.is_array() || item.size() != 3 || !item[0].is_number_unsigned() ||
        !item[1].is_number_unsigned() || !item[2].is_string()) {
      return InvalidArgument("what was written is said as begin, end, digests");
    }
    WrittenRange range{{item[0].get<uint64_t>(), item[1].get<uint64_t>()}, {}};
    TC_ASSIGN_OR_RETURN(range.crc32c, ParseDigests(item[2].get<std::string>()));
    written.push_back(std::move(range));
  }
  return written;
}

Json FinalsJson(const WrittenPlan& written) {
  Json files = Json::array();
  for (const WrittenFinal& file : written.final_files) {
    files.push_back({{"file", file.file},
                     {"id", file.id},
                     {"ranges", RangesJson(file.ranges)}});
  }
  return {{"files", std::move(files)},
          {"spill", written.spill ? SpillJson(*written.spill) : Json()},
          {"ring_bytes", written.ring_bytes}};
}

Result<RankFinals> ParseFinals(const Json& item) {
  RankFinals rank;
  TC_ASSIGN_OR_RETURN(rank.rank, GetInt(item, "rank"));
  TC_ASSIGN_OR_RETURN(const Json* calls, GetList(item, "calls"));
  for (const Json& call : *calls) {
    TC_ASSIGN_OR_RETURN(const Json* files, GetList(call, "files"));
    for (const Json& file : *files) {
      WrittenFinal written;
      TC_ASSIGN_OR_RETURN(const int64_t index, GetInt(file, "file"));
      written.file = static_cast<uint32_t>(index);
      TC_ASSIGN_OR_RETURN(written.id, GetString(file, "id"));
      TC_ASSIGN_OR_RETURN(const Json* ranges, GetList(file, "ranges"));
      TC_ASSIGN_OR_RETURN(written.ranges, ParseRanges(*ranges));
      rank.files.push_back(std::move(written));
    }
    const auto spill = call.find("spill");
    if (spill == call.end() || spill->is_null()) continue;
    TC_ASSIGN_OR_RETURN(WrittenSpill parsed, ParseSpill(*spill));
    rank.spills.push_back(std::move(parsed));
  }
  return rank;
}

}  // namespace torch_ckpt
