#include "engine/header_io.h"

#include <array>
#include <string>

namespace torch_ckpt {

Result<FileHeader> ReadFileHeader(const File& file) {
  TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  if (!info.is_regular) {
    return Corrupt("is not a regular file").WithFile(file.path());
  }
  if (info.bytes < 8) {
    return Corrupt("has " + std::to_string(info.bytes) +
                   " bytes, too few for a safetensors file")
        .WithFile(file.path());
  }
  std::array<std::byte, 8> first;
  TC_RETURN_IF_ERROR(file.ReadExact(first, 0));
  Result<uint64_t> length = ParseHeaderLength(first, info.bytes);
  if (!length.ok()) return length.status().WithFile(file.path());
  std::string text(*length, '\0');
  TC_RETURN_IF_ERROR(file.ReadExact(
      {reinterpret_cast<std::byte*>(text.data()), text.size()}, 8));
  Result<SafetensorsHeader> header =
      ParseSafetensorsHeader(AsBytes(text), info.bytes);
  if (!header.ok()) return header.status().WithFile(file.path());
  Result<ShardingInfo> sharding = ParseShardingInfo(*header);
  if (!sharding.ok()) return sharding.status().WithFile(file.path());
  return FileHeader{std::move(header).value(), std::move(sharding).value()};
}

}  // namespace torch_ckpt
