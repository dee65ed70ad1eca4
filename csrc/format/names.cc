#include "format/names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <span>

#include "base/bytes.h"
#include "format/name_index.h"
#include "os/random.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMaxFileNameBytes = 255;   // NAME_MAX of every Linux fs
constexpr size_t kMaxFilePathBytes = 4095;  // PATH_MAX, without its NUL
constexpr ptrdiff_t kMaxFilePathNames = 16;
constexpr size_t kIdBytes = 16;

std::string Padded(int64_t value) {
  std::string digits = std::to_string(value);
  if (digits.size() < 5) digits.insert(0, 5 - digits.size(), '0');
  return digits;
}

// The number that `text` is Padded() of.
std::optional<int64_t> FromPadded(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 ||
      Padded(value) != text) {
    return std::nullopt;
  }
  return value;
}

constexpr std::string_view kShardStem = "shard-";
constexpr std::string_view kObjectsStem = "objects-";
constexpr std::string_view kOf = "-of-";
constexpr std::string_view kPartStem = "torch_ckpt-";
constexpr std::string_view kPartEnd = ".json";

std::string PartStem(int64_t rank, int64_t world_size) {
  return std::string(kPartStem) + Padded(rank + 1) + std::string(kOf) +
         Padded(world_size);
}

// For messages: an untrusted name without what could upset a terminal.
std::string Quoted(std::string_view name) {
  std::string out = "'";
  for (char c : name.substr(0, 80)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte >= 0x7f ? '?' : c;
  }
  return out + (name.size() > 80 ? "...'" : "'");
}

// Length of the UTF-8 sequence at `p`, 0 when it is none (overlong forms,
// surrogates and values above U+10FFFF are none).
size_t SequenceLength(const unsigned char* p, size_t left) {
  const unsigned char lead = p[0];
  if (lead < 0x80) return 1;
  size_t length = 0;
  unsigned char low = 0x80, high = 0xbf;  // of the second byte
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  }
  if (length == 0 || left < length) return 0;
  if (p[1] < low || p[1] > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (p[i] < 0x80 || p[i] > 0xbf) return 0;
  }
  return length;
}

}  // namespace

bool IsShardName(std::string_view name) {
  return name.starts_with(kShardStem) && name.ends_with(kDataSuffix);
}

std::optional<int64_t> RankOfShard(std::string_view name) {
  if (!IsShardName(name)) return std::nullopt;
  name.remove_prefix(kShardStem.size());
  const auto number = FromPadded(name.substr(0, name.find('-')));
  if (!number) return std::nullopt;
  return *number - 1;
}

std::string SingleFileName(std::string_view index_name) {
  index_name.remove_suffix(kIndexSuffix.size());
  return std::string(index_name) + std::string(kDataSuffix);
}

std::string_view SubdirectoryOf(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == path.npos ? std::string_view() : path.substr(0, slash);
}

std::string_view FileNameOf(std::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

std::string PathIn(std::string_view subdirectory, std::string_view name) {
  std::string path(subdirectory);
  if (!path.empty()) path += '/';
  path += name;
  return path;
}

std::string FinalFileName(int64_t index, int64_t count,
                          const FileNaming& naming) {
  std::string name = naming.stem;
  if (count != 1 || naming.number_single) {
    name += "-" + Padded(index) + "-of-" + Padded(count);
  }
  return PathIn(naming.subdirectory, name + std::string(kDataSuffix));
}

std::string IndexFileName(int64_t count, const FileNaming& naming) {
  if (!naming.has_index || (count == 1 && !naming.number_single)) return {};
  return PathIn(naming.subdirectory, naming.stem + std::string(kIndexSuffix));
}

std::optional<NumberedName> ParseNumberedName(std::string_view name,
                                              std::string_view suffix) {
  constexpr size_t kDigits = 5;
  if (!name.ends_with(suffix)) return std::nullopt;
  name.remove_suffix(suffix.size());
  const size_t of = name.rfind(kOf);
  if (of == name.npos) return std::nullopt;
  const auto count = FromPadded(name.substr(of + kOf.size()));
  name = name.substr(0, of);
  const size_t dash = name.rfind('-');
  if (!count || dash == name.npos) return std::nullopt;
  const auto index = FromPadded(name.substr(dash + 1));
  if (!index || *index > *count) return std::nullopt;
  std::string_view stem = name.substr(0, dash);
  const size_t rank = kShardStem.size();
  if (stem.starts_with(kShardStem) && stem.size() > rank + kDigits &&
      FromPadded(stem.substr(rank, stem.find('-', rank) - rank))) {
    stem.remove_prefix(stem.find('-', rank) + 1);
  }
  return NumberedName{stem, *index, *count};
}

std::string ObjectFileName(int64_t rank) {
  return std::string(kObjectsStem) + Padded(rank + 1) + ".json";
}

std::string PartManifestName(int64_t rank, int64_t world_size) {
  return PartStem(rank, world_size) + std::string(kPartEnd);
}

std::string PartCatalogName(int64_t rank, int64_t world_size) {
  return PartStem(rank, world_size) + ".catalog";
}

std::string PartStageName(int64_t rank) {
  return std::string(kStageSuffix) + "-" + Padded(rank + 1);
}

std::optional<int64_t> RankOfFile(std::string_view name) {
  for (const std::string_view stem : {kShardStem, kObjectsStem, kPartStem}) {
    if (!name.starts_with(stem)) continue;
    name.remove_prefix(stem.size());
    const auto number = FromPadded(name.substr(0, name.find_first_of("-.")));
    return number ? std::optional(*number - 1) : std::nullopt;
  }
  return std::nullopt;
}

bool IsStockMetadataName(std::string_view name) {
  if (name == kStockMetadataNames[0]) return true;
  constexpr std::string_view kStem = "__", kEnd = ".metadata";
  if (!name.starts_with(kStem) || !name.ends_with(kEnd)) return false;
  name.remove_prefix(kStem.size());
  name.remove_suffix(std::min(kEnd.size(), name.size()));
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

bool IsPartManifestName(std::string_view name) {
  if (!name.starts_with(kPartStem) || !name.ends_with(kPartEnd)) return false;
  name.remove_prefix(kPartStem.size());
  const size_t of = name.find(kOf);
  if (of == name.npos || name.size() < of + kOf.size() + kPartEnd.size()) {
    return false;
  }
  const auto rank = FromPadded(name.substr(0, of));
  name.remove_prefix(of + kOf.size());
  name.remove_suffix(kPartEnd.size());
  const auto world_size = FromPadded(name);
  return rank && world_size && *rank <= *world_size;
}

std::optional<int64_t> RankOfPartStage(std::string_view name) {
  const std::string prefix = std::string(kStageSuffix) + "-";
  if (!name.starts_with(prefix)) return std::nullopt;
  const auto number = FromPadded(name.substr(prefix.size()));
  return number ? std::optional(*number - 1) : std::nullopt;
}

Status CheckFileName(std::string_view name) {
  const auto refuse = [&](const char* why) {
    return Corrupt("file name " + Quoted(name) + " " + why);
  };
  if (name.empty()) return refuse("is empty");
  if (name.size() > kMaxFileNameBytes) return refuse("is too long");
  if (name.front() == '.') return refuse("starts with a dot");
  for (char c : name) {
    if (c == '/' || c == '\\' || c == ':')
      return refuse("is not a plain name in the directory");
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) return refuse("holds a control character");
  }
  if (!IsUtf8(name)) return refuse("is not UTF-8");
  return {};
}

Status CheckFilePath(std::string_view path) {
  if (path.size() > kMaxFilePathBytes ||
      std::count(path.begin(), path.end(), '/') >= kMaxFilePathNames) {
    return Corrupt("file path " + Quoted(path) + " is too long");
  }
  for (;;) {
    const size_t slash = path.find('/');
    TC_RETURN_IF_ERROR(CheckFileName(path.substr(0, slash)));
    if (slash == path.npos) return {};
    path.remove_prefix(slash + 1);
  }
}

Status CheckTensorName(std::string_view name) {
  const auto refuse = [&](const char* why) {
    return InvalidArgument("tensor name " + Quoted(name) + " " + why);
  };
  if (name.size() > kMaxNameBytes) return refuse("is too long");
  if (name.find('\0') != std::string_view::npos) return refuse("holds a NUL");
  if (name == "__metadata__") return refuse("is reserved by safetensors");
  if (!IsUtf8(name)) return refuse("is not UTF-8");
  return {};
}

bool IsUtf8(std::string_view text) {
  constexpr uint64_t kNotAscii = 0x8080808080808080;
  const ByteSpan bytes = AsBytes(text);
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  for (size_t i = 0; i < text.size();) {
    // Eight characters at a time, since nearly all names are ASCII.
    if (text.size() - i >= sizeof(uint64_t) &&
        (LoadU64(&bytes[i]) & kNotAscii) == 0) {
      i += sizeof(uint64_t);
      continue;
    }
    const size_t length = SequenceLength(p + i, text.size() - i);
    if (length == 0) return false;
    i += length;
  }
  return true;
}

std::optional<std::string_view> FindDuplicate(
    std::span<const std::string_view> names) {
  constexpr size_t kFew = 8;  // an entry of a header has three keys
  if (names.size() <= kFew) {
    for (size_t i = 1; i < names.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (names[i] == names[j]) return names[i];
      }
    }
    return std::nullopt;
  }
  // As in the files that we write.
  const auto ascends = [](std::string_view a, std::string_view b) {
    return a < b;
  };
  if (std::adjacent_find(names.begin(), names.end(), std::not_fn(ascends)) ==
      names.end()) {
    return std::nullopt;
  }
  NameIndex seen;
  const auto name_at = [&](uint32_t i) { return names[i]; };
  for (uint32_t i = 0; i < names.size(); ++i) {
    if (seen.Insert(names[i], i, name_at) != i) return names[i];
  }
  return std::nullopt;
}

std::string StagedName(std::string_view path, std::string_view file_id) {
  std::string out(FileNameOf(path));
  out += '.';
  out += file_id;
  return out;
}

std::string NewId() {
  std::array<std::byte, kIdBytes> raw;
  FillRandom(raw);
  std::string id;
  id.reserve(2 * kIdBytes);
  AppendHex(&id, raw);
  return id;
}

bool IsId(std::string_view text) {
  return text.size() == 2 * kIdBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace torch_ckpt
