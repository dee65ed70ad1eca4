#include "format/torch/zip.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

constexpr uint32_t kLocalMagic = 0x04034b50;
constexpr uint32_t kEntryMagic = 0x02014b50;
constexpr uint32_t kEndMagic = 0x06054b50;
constexpr uint32_t kEnd64Magic = 0x06064b50;
constexpr uint32_t kLocatorMagic = 0x07064b50;

constexpr size_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;
constexpr size_t kEntryBytes = 46;
constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kEncrypted = 1;  // a flag
constexpr uint32_t kIn64 = 0xffffffff;
constexpr uint16_t kIn64Short = 0xffff;

template <class T>
T Load(ByteSpan bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

Status Damaged(const std::string& what) {
  return Corrupt("the zip archive is damaged: " + what);
}

// The numbers of a zip64 extra field, in their order.
class Extra64 {
 public:
  // `extra`: all extra fields of an entry.
  explicit Extra64(ByteSpan extra) {
    while (extra.size() >= 4) {
      const auto id = Load<uint16_t>(extra, 0);
      const size_t bytes = Load<uint16_t>(extra, 2);
      if (bytes > extra.size() - 4) return;
      if (id == kZip64Extra) {
        left_ = extra.subspan(4, bytes);
        return;
      }
      extra = extra.subspan(4 + bytes);
    }
  }
  // `said` is what stands in the field of 32 bits.
  std::optional<uint64_t> Number(uint32_t said) {
    if (said != kIn64) return said;
    if (left_.size() < 8) return std::nullopt;
    const auto number = Load<uint64_t>(left_, 0);
    left_ = left_.subspan(8);
    return number;
  }

 private:
  ByteSpan left_;
};

// What the zip64 end says, where `tail` ends with the locator of it.
Result<ZipDirectory> Directory64(ByteSpan tail, uint64_t archive_bytes) {
  const uint64_t tail_begin = archive_bytes - tail.size();
  if (tail.size() < kEndBytes + kLocatorBytes) {
    return Damaged("it ends within its directory");
  }
  const size_t locator = tail.size() - kEndBytes - kLocatorBytes;
  if (Load<uint32_t>(tail, locator) != kLocatorMagic) {
    return Damaged("the end of a large archive is missing");
  }
  const auto at = Load<uint64_t>(tail, locator + 8);
  if (at < tail_begin || at - tail_begin > locator ||
      locator - (at - tail_begin) < kEnd64Bytes) {
    return Damaged("the end of a large archive is not where it says");
  }
  const ByteSpan end = tail.subspan(at - tail_begin);
  if (Load<uint32_t>(end, 0) != kEnd64Magic) {
    return Damaged("the end of a large archive is missing");
  }
  if (Load<uint32_t>(end, 16) != 0 || Load<uint32_t>(end, 20) != 0 ||
      Load<uint64_t>(end, 24) != Load<uint64_t>(end, 32)) {
    return Unsupported("the zip archive spans several disks");
  }
  return ZipDirectory{Load<uint64_t>(end, 48), Load<uint64_t>(end, 40),
                      Load<uint64_t>(end, 32)};
}

// Whether the end of an archive stands there, and its comment behind it.
bool EndsAt(ByteSpan tail, size_t at) {
  return Load<uint32_t>(tail, at) == kEndMagic &&
         Load<uint16_t>(tail, at + 20) == tail.size() - at - kEndBytes;
}

}  // namespace

bool EndsWithoutComment(ByteSpan tail) {
  return tail.size() >= kEndBytes && EndsAt(tail, tail.size() - kEndBytes);
}

Result<ZipDirectory> FindZipDirectory(ByteSpan tail, uint64_t archive_bytes) {
  if (tail.size() < kEndBytes || tail.size() > archive_bytes) {
    return Corrupt("is no zip archive: it has " +
                   std::to_string(archive_bytes) + " bytes");
  }
  // The last one there is: a comment may hold anything.
  size_t at = tail.size() - kEndBytes;
  while (at > 0 && !EndsAt(tail, at)) --at;
  if (!EndsAt(tail, at)) {
    return Corrupt("is no zip archive, or is cut short: its end is missing");
  }
  const uint64_t comment = tail.size() - at - kEndBytes;
  tail = tail.first(at + kEndBytes);
  archive_bytes -= comment;
  const ByteSpan end = tail.last(kEndBytes);
  if (Load<uint16_t>(end, 4) != 0 || Load<uint16_t>(end, 6) != 0) {
    return Unsupported("the zip archive spans several disks");
  }
  ZipDirectory out{Load<uint32_t>(end, 16), Load<uint32_t>(end, 12),
                   Load<uint16_t>(end, 10)};
  if (out.begin == kIn64 || out.bytes == kIn64 || out.entries == kIn64Short) {
    TC_ASSIGN_OR_RETURN(out, Directory64(tail, archive_bytes));
  }
  const auto after = CheckedAdd(out.begin, out.bytes);
  if (!after || *after > archive_bytes - kEndBytes ||
      out.entries > out.bytes / kEntryBytes) {
    return Damaged("its directory is not inside it");
  }
  return out;
}

Result<std::vector<ZipEntry>> ParseZipDirectory(ByteSpan bytes,
                                                const ZipDirectory& directory) {
  std::vector<ZipEntry> out;
  out.reserve(directory.entries);
  for (uint64_t i = 0; i < directory.entries; ++i) {
    if (bytes.size() < kEntryBytes || Load<uint32_t>(bytes, 0) != kEntryMagic) {
      return Damaged("entry " + std::to_string(i) + " of its directory");
    }
    const size_t name = Load<uint16_t>(bytes, 28);
    const size_t extra = Load<uint16_t>(bytes, 30);
    const size_t comment = Load<uint16_t>(bytes, 32);
    if (bytes.size() - kEntryBytes < name + extra + comment) {
      return Damaged("entry " + std::to_string(i) + " of its directory");
    }
    ZipEntry entry;
    entry.name = AsText(bytes.subspan(kEntryBytes, name));
    entry.crc32 = Load<uint32_t>(bytes, 16);
    entry.crc32_at = directory.begin + directory.bytes - bytes.size() + 16;
    constexpr uint16_t kDescribed = 8;  // a flag
    entry.described = (Load<uint16_t>(bytes, 8) & kDescribed) != 0;
    Extra64 large(bytes.subspan(kEntryBytes + name, extra));
    const auto content = large.Number(Load<uint32_t>(bytes, 24));
    const auto stored = large.Number(Load<uint32_t>(bytes, 20));
    const auto header = large.Number(Load<uint32_t>(bytes, 42));
    const std::string named = "its entry " + std::string(entry.name);
    if (!content || !stored || !header) return Damaged(named);
    if (Load<uint16_t>(bytes, 8) & kEncrypted) {
      return Unsupported(named + " is encrypted");
    }
    if (Load<uint16_t>(bytes, 10) != 0 || *content != *stored) {
      return Unsupported(
          named +
          " is compressed, which torch.save does not do (torch.jit.save does)");
    }
    entry.header = *header;
    entry.bytes = *content;
    const auto after = CheckedAdd(*header, *content);
    if (!after || *after > directory.begin) {
      return Damaged(named + " is not inside it");
    }
    out.push_back(entry);
    bytes = bytes.subspan(kEntryBytes + name + extra + comment);
  }
  if (!bytes.empty()) return Damaged("its directory is longer than it says");
  // Of what the directory says; TorchArchive::Contents looks at the headers
  // too.
  std::vector<std::pair<uint64_t, uint64_t>> spans;  // begin, end at least
  for (const ZipEntry& entry : out) {
    spans.emplace_back(entry.header, entry.header + kZipLocalHeader +
                                         entry.name.size() + entry.bytes);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) {
      return Damaged("two of its entries overlap");
    }
  }
  return out;
}

Result<uint64_t> ZipContentBegin(ByteSpan header, const ZipEntry& entry,
                                 const ZipDirectory& directory) {
  const std::string named = "its entry " + std::string(entry.name);
  if (header.size() < kZipLocalHeader ||
      Load<uint32_t>(header, 0) != kLocalMagic ||
      Load<uint16_t>(header, 26) != entry.name.size()) {
    return Damaged(named + " is not where the directory says");
  }
  const uint64_t begin = entry.header + kZipLocalHeader +
                         Load<uint16_t>(header, 26) +
                         Load<uint16_t>(header, 28);
  if (begin > directory.begin || entry.bytes > directory.begin - begin) {
    return Damaged(named + " is not inside it");
  }
  return begin;
}

}  // namespace torch_ckpt
