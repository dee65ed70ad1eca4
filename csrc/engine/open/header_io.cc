#include "engine/open/header_io.h"

#include <algorithm>
#include <array>
#include <new>

#include "engine/open/not_weights.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kLengthBytes = 8;
// Of the first read: the whole header of a file of a few tensors.
constexpr uint64_t kFirstBytes = 4096;

std::string ShortName(const std::string& staged) { return staged + ".header"; }

// The header with its length field.
Result<std::string> ReadText(const File& file, const FileInfo& info) {
  if (!info.is_regular) {
    return Corrupt("is not a regular file").WithFile(file.path());
  }
  if (info.bytes < kLengthBytes) {
    TC_RETURN_IF_ERROR(CheckNoStandIn(file));
    return Corrupt("has " + std::to_string(info.bytes) +
                   " bytes, too few for a safetensors file")
        .WithFile(file.path());
  }
  std::string text;
  const auto read_to = [&](uint64_t end) {
    const uint64_t begin = text.size();
    text.resize(end);
    auto* const data = reinterpret_cast<std::byte*>(text.data());
    return file.ReadExact({data + begin, end - begin}, begin);
  };
  TC_RETURN_IF_ERROR(read_to(std::min(kFirstBytes, info.bytes)));
  Result<uint64_t> length = ParseHeaderLength(AsBytes(text), info.bytes);
  if (!length.ok()) {
    TC_RETURN_IF_ERROR(CheckNoStandIn(file));
    return length.status().WithFile(file.path());
  }
  const uint64_t end = kLengthBytes + *length;
  if (end > text.size()) TC_RETURN_IF_ERROR(read_to(end));
  text.resize(end);
  return text;
}

Result<FileHeader> Parse(const File& file, const FileInfo& info,
                         std::string_view text) {
  Result<SafetensorsHeader> header =
      ParseSafetensorsHeader(AsBytes(text.substr(kLengthBytes)), info.bytes);
  if (!header.ok()) return header.status().WithFile(file.path());
  Result<ShardingInfo> sharding = ParseShardingInfo(*header);
  if (!sharding.ok()) return sharding.status().WithFile(file.path());
  return FileHeader{std::move(header).value(), std::move(sharding).value()};
}

}  // namespace

Result<FileHeader> ReadFileHeader(const File& file, const FileInfo& info) {
  TC_ASSIGN_OR_RETURN(const std::string text, ReadText(file, info));
  return Parse(file, info, text);
}

std::string PeekFileIdOf(const Directory& directory, const std::string& name,
                         OpenOptions options) {
  constexpr size_t kPeeked = 4096;  // an id stands in them
  std::array<std::byte, kPeeked> first;
  const Result<File> file = directory.OpenFile(name, options);
  if (!file.ok()) return {};
  const Result<uint64_t> count = file->Read(first, 0);
  return count.ok() ? PeekFileId(ByteSpan(first).first(*count)) : std::string();
}

Status StageHeader(const Directory& staging, const std::string& staged,
                   const FileHeader& file, std::string_view text) {
  if (text.size() < kMinStagedText) return {};
  TC_ASSIGN_OR_RETURN(
      File out,
      staging.OpenFile(ShortName(staged), {.write = true, .create_new = true}));
  const std::string bytes =
      EncodeShortHeader(file, Crc32c(0, text.data(), text.size()));
  TC_RETURN_IF_ERROR(out.WriteAll(AsBytes(bytes), 0));
  return out.Close();
}

void UnstageHeader(const Directory& staging,
                   const std::string& staged) noexcept {
  try {
    (void)staging.Unlink(ShortName(staged), true);
  } catch (const std::bad_alloc&) {
    // No memory for a name; nothing more can be done here.
  }
}

Result<FileHeader> ReadStagedHeader(const Directory& staging,
                                    const std::string& staged) {
  TC_ASSIGN_OR_RETURN(const File file, staging.OpenFile(staged, {}));
  TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  TC_ASSIGN_OR_RETURN(const std::string text, ReadText(file, info));
  // Whatever is wrong with the short form, the text still says all.
  const Result<std::string> bytes =
      text.size() < kMinStagedText
          ? Incomplete("a short text has no short form")
          : staging.ReadFile(ShortName(staged), kMaxHeaderBytes);
  if (bytes.ok()) {
    Result<ShortHeader> known = DecodeShortHeader(AsBytes(*bytes));
    if (known.ok() && known->file.header.file_bytes == info.bytes &&
        known->file.header.data_begin == text.size() &&
        known->text_crc32c == Crc32c(0, text.data(), text.size())) {
      return std::move(known->file);
    }
  }
  return Parse(file, info, text);
}

}  // namespace torch_ckpt
