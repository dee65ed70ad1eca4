#include "engine/open/read_megatron.h"

#include <algorithm>
#include <utility>

#include "engine/open/read_dcp.h"
#include "engine/open/read_zarr.h"
#include "engine/open/torch_leaves.h"
#include "format/json.h"
#include "format/torch/dcp_metadata.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kConfigName = "metadata.json";
constexpr std::string_view kCommonFile = "common.pt";
constexpr std::string_view kCommonObject = "common_state/shard_0_1";
constexpr std::string_view kBackend = "torch_dist", kZarrBackend = "zarr";
constexpr uint64_t kMaxConfigBytes = uint64_t{1} << 20;
constexpr int kMaxConfigDepth = 16;

bool Has(std::span<const std::string> names, std::string_view name) {
  return std::binary_search(names.begin(), names.end(), name);
}

// Takes "sharded_backend"; whatever else later versions say is let pass.
class ConfigHandler : public JsonHandler {
 public:
  bool OnKey(std::string_view key) override {
    is_backend_ = depth_ == 1 && key == "sharded_backend";
    return true;
  }
  bool OnString(std::string_view text) override {
    if (std::exchange(is_backend_, false)) backend = text;
    return true;
  }
  bool OnUnsigned(uint64_t) override { return true; }
  bool OnOtherNumber(double) override { return true; }
  bool OnBool(bool) override { return true; }
  bool OnNull() override { return true; }
  bool OnBeginObject() override { return ++depth_ > 0; }
  bool OnEndObject() override { return --depth_ >= 0; }
  bool OnBeginArray() override { return ++depth_ > 0; }
  bool OnEndArray() override { return --depth_ >= 0; }

  std::string backend;

 private:
  int depth_ = 0;
  bool is_backend_ = false;
};

// What metadata.json says to be the backend; empty where it is of another
// making.
Result<std::string> ReadBackend(const Directory& directory) {
  const std::string name(kConfigName);
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                      directory.StatName(name));
  if (!info || info->bytes > kMaxConfigBytes) return std::string();
  TC_ASSIGN_OR_RETURN(const std::string text,
                      directory.ReadFile(name, kMaxConfigBytes));
  ConfigHandler config;
  const Status parsed = ParseJson(text, kMaxConfigDepth, &config);
  return parsed.ok() ? config.backend : std::string();
}

// The leaves of an archive in one of the files that are in `read`.
Status AddCommon(const Directory& directory, const TorchArchivePlace& archive,
                 DcpDirectory* read, TorchLeavesAdder* adder) {
  const std::string& name = read->found.files[archive.file].name;
  TC_ASSIGN_OR_RETURN(const File file, directory.OpenFile(name, {}));
  const Result<TorchLeaves> leaves = FindTorchLeaves(file, archive.range, true);
  if (!leaves.ok()) return leaves.status().WithFile(file.path());
  Status added =
      adder->Add(archive.file, "the common state in " + name, *leaves);
  if (!added.ok()) return std::move(added).WithFile(directory.path());
  read->found.archives.push_back(archive);
  return {};
}

Status AddCommonFile(const Directory& directory, DcpDirectory* read,
                     TorchLeavesAdder* adder) {
  const std::string name(kCommonFile);
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info,
                      directory.StatName(name));
  if (!info) {
    return Conflict("went while it was read").WithFile(directory.Join(name));
  }
  read->found.AddFile(name, *info);
  read->found.identity += " " + std::to_string(info->modified_ns);
  const auto number = static_cast<uint32_t>(read->found.files.size() - 1);
  return AddCommon(directory, {number, {0, info->bytes}}, read, adder);
}

}  // namespace

Result<bool> IsMegatron(const Directory& directory,
                        std::span<const std::string> names) {
  if (!Has(names, kConfigName)) return false;
  TC_ASSIGN_OR_RETURN(const std::string backend, ReadBackend(directory));
  return backend == kZarrBackend || (!backend.empty() && HasDcpMetadata(names));
}

Result<ForeignCatalog> ReadMegatron(const Directory& directory,
                                    std::span<const std::string> names, bool) {
  TC_ASSIGN_OR_RETURN(const std::string backend, ReadBackend(directory));
  if (backend != kBackend && backend != kZarrBackend) {
    return Unsupported("is of Megatron's backend '" + backend +
                       "'; torch_dist and zarr are read")
        .WithFile(directory.Join(std::string(kConfigName)));
  }
  if (backend == kZarrBackend && !Has(names, kCommonFile)) {
    return Incomplete("is missing, and metadata.json says that it was written")
        .WithFile(directory.Join(std::string(kCommonFile)));
  }
  if (backend == kZarrBackend && HasDcpMetadata(names)) {
    return Conflict(
               "is of stock DCP, in a directory whose metadata.json says zarr")
        .WithFile(directory.Join(std::string(kDcpMetadataName)));
  }
  DcpDirectory read;
  if (backend == kBackend) {
    TC_ASSIGN_OR_RETURN(read, ReadDcpDirectory(directory, kCommonObject));
  } else {
    TC_RETURN_IF_ERROR(ReadZarrTree(directory, &read.found, &read.catalog));
  }
  read.found.source = "megatron";
  TorchLeavesAdder adder(&read.catalog);
  if (read.apart) {
    TC_RETURN_IF_ERROR(AddCommon(directory, *read.apart, &read, &adder));
  }
  if (Has(names, kCommonFile)) {
    TC_RETURN_IF_ERROR(AddCommonFile(directory, &read, &adder));
  }
  if (backend == kZarrBackend) {
    read.found.identity = IdentityOf(read.found.files, read.found.infos);
  }
  read.found.common = adder.Names();
  Status finished = adder.Finish(&read.found);
  if (!finished.ok()) return std::move(finished).WithFile(directory.path());
  return std::move(read.found);
}

}  // namespace torch_ckpt
