// The words that manifests and journals are written and read with.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace torch_ckpt::internal {

inline constexpr std::string_view kManifestFormat = "torch_ckpt";
inline constexpr std::string_view kJournalFormat = "torch_ckpt.journal";

// In the order of the enum.
inline constexpr std::array<std::string_view, 2> kContainerNames = {
    "safetensors", "raw"};

// The last line of both texts: the CRC of everything before it.
inline constexpr size_t kCrcDigits = 8;
inline constexpr std::string_view kTailStart = "\"crc32c\": \"";
inline constexpr std::string_view kTailEnd = "\"\n}\n";

}  // namespace torch_ckpt::internal
