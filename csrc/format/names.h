// File names: building stock ones, and refusing dangerous ones. And what may
// be the name of a tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torch_ckpt {

inline constexpr std::string_view kManifestName = "torch_ckpt.json";
inline constexpr std::string_view kCatalogName = "torch_ckpt.catalog";
inline constexpr std::string_view kIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kJournalName = "commit.json";
// In a staging place: the directory of the save that is committed, with its
// journal.
inline constexpr std::string_view kCommittedName = "committed";
inline constexpr std::string_view kStageSuffix = ".torch_ckpt-stage";
inline constexpr std::string_view kDataSuffix = ".safetensors";
inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";

// What directories with our manifest are called among formats.
inline constexpr std::string_view kOurFormat = "torch_ckpt";
// And those of safetensors files of whole tensors, whoever wrote them.
inline constexpr std::string_view kWholeFormat = "hf";
// And files of torch.save.
inline constexpr std::string_view kTorchFormat = "torch";

// Of a tensor's name, and of every key in a JSON text that is read.
inline constexpr size_t kMaxNameBytes = 65535;

// Of a path below the directory of a checkpoint: "a/b" and "c" of "a/b/c". The
// first is empty where that is the checkpoint's own.
std::string_view SubdirectoryOf(std::string_view path);
std::string_view FileNameOf(std::string_view path);
// Both as one path.
std::string PathIn(std::string_view subdirectory, std::string_view name);

// What final files are called: "<stem>-{i:05}-of-{n:05}.safetensors".
struct FileNaming {
  std::string stem = "model";
  // One file is called that too, and not "<stem>.safetensors", without an
  // index.
  bool number_single = true;
  bool has_index = true;          // else no index stands beside the files
  std::string subdirectory = {};  // where they stand, and their index
};

// The stems that we write and readers look for by themselves.
inline constexpr std::array<std::string_view, 3> kFinalStems = {
    "model", "diffusion_pytorch_model", "adapter_model"};

// Indices count from 1, ranks from 0.
std::string FinalFileName(int64_t index, int64_t count,
                          const FileNaming& naming = {});
// Of the index that stands beside `count` files; empty where none does.
std::string IndexFileName(int64_t count, const FileNaming& naming = {});
std::string ObjectFileName(int64_t rank);
// "<stem>.safetensors" for "<stem>.safetensors.index.json": the file that
// transformers takes before that index. REQUIRES: ends in kIndexSuffix.
std::string SingleFileName(std::string_view index_name);
// By which stock DCP finds what it has saved: ".metadata", or of each rank
// without collectives "__{rank}.metadata".
inline constexpr std::array<std::string_view, 2> kStockMetadataNames = {
    ".metadata", "__0.metadata"};  // the first there is
bool IsStockMetadataName(std::string_view name);
// Whether a data file is called as one rank's, ours or stock's.
bool IsShardName(std::string_view name);
// The rank whose file is called so.
std::optional<int64_t> RankOfShard(std::string_view name);

// What the name "<stem>-{i:05}-of-{n:05}<suffix>" says, by which everybody
// calls the files of one model. The stem of a shard is without its rank.
struct NumberedName {
  std::string_view stem;  // of the name that was parsed
  int64_t index = 0, count = 0;
};
std::optional<NumberedName> ParseNumberedName(
    std::string_view name, std::string_view suffix = kDataSuffix);

// A save without collectives: every rank commits a part of its own.
//   torch_ckpt-{rank+1:05}-of-{world:05}.json / .catalog   in the directory
//   .torch_ckpt-stage-{rank+1:05}                           the rank's staging
std::string PartManifestName(int64_t rank, int64_t world_size);
std::string PartCatalogName(int64_t rank, int64_t world_size);
std::string PartStageName(int64_t rank);
// The rank that a shard, an objects file, or the manifest or catalog of a part
// is named after.
std::optional<int64_t> RankOfFile(std::string_view name);
// Whether `name` is the manifest of some rank of some world.
bool IsPartManifestName(std::string_view name);
// The rank whose staging directory has this name.
std::optional<int64_t> RankOfPartStage(std::string_view name);

// A plain basename: not empty, at most 255 bytes of UTF-8, no '/', '\\', ':' or
// NUL, no leading '.', no control characters. Every name that comes out of a
// JSON file passes here before it is opened. kCorrupt otherwise.
Status CheckFileName(std::string_view name);

// A path below the directory: at most 16 names that CheckFileName takes, with
// one '/' between them, of at most 4,095 bytes. kCorrupt otherwise.
Status CheckFilePath(std::string_view path);

// UTF-8 without NUL, at most kMaxNameBytes, not "__metadata__" (which a
// safetensors header cannot say). kInvalidArgument otherwise.
Status CheckTensorName(std::string_view name);

bool IsUtf8(std::string_view text);

// The first name found that occurs twice. O(n) whatever the names are.
// The result views what `names` views.
std::optional<std::string_view> FindDuplicate(
    std::span<const std::string_view> names);

// "<name>.<file id>": a file in staging, whatever subdirectory it is for; never
// ends in .safetensors.
std::string StagedName(std::string_view path, std::string_view file_id);
// 128 random bits from the kernel as 32 lower-case hex digits.
std::string NewId();
bool IsId(std::string_view text);

}  // namespace torch_ckpt
