#include "engine/merge_log.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <sstream>

#include "base/checked.h"
#include "format/binary.h"
#include "format/names.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kMarkName = "merge_plan";
constexpr std::string_view kMarkMagic = "TCKPTMRG";
constexpr std::string_view kLogPrefix = "merge_log.";
constexpr uint64_t kMaxLogBytes = uint64_t{1} << 30;
constexpr size_t kMaxIdentityBytes = size_t{1} << 30;
constexpr int kReaders = 4;
constexpr std::chrono::minutes kPatience{10};

uint32_t CrcOf(std::string_view text) {
  return Crc32c(0, text.data(), text.size());
}

// Takes the next number of a line, and the blank behind it.
std::optional<uint64_t> TakeNumber(std::string_view* line, int base) {
  uint64_t value = 0;
  const auto [end, error] =
      std::from_chars(line->data(), line->data() + line->size(), value, base);
  if (error != std::errc() || end == line->data()) return std::nullopt;
  line->remove_prefix(static_cast<size_t>(end - line->data()));
  if (!line->empty()) {
    if (line->front() != ' ') return std::nullopt;
    line->remove_prefix(1);
  }
  return value;
}

struct LogLine {
  size_t file;
  WrittenRange range;
};

std::string LineText(size_t file, const WrittenRange& range) {
  std::ostringstream out;
  out << file << ' ' << range.bytes.begin << ' ' << range.bytes.end << ' '
      << std::hex;
  for (const uint32_t crc : range.crc32c) out << crc << ' ';
  const std::string text = std::move(out).str();
  std::ostringstream line;
  line << text << std::hex << CrcOf(text) << '\n';
  return std::move(line).str();
}

std::optional<LogLine> ParseLine(std::string_view line,
                                 const std::vector<OutputSpec>& files) {
  const size_t last = line.rfind(' ');
  if (last == line.npos) return std::nullopt;
  std::string_view digest = line.substr(last + 1);
  const auto crc = TakeNumber(&digest, 16);
  if (!crc || !digest.empty() || *crc != CrcOf(line.substr(0, last + 1))) {
    return std::nullopt;
  }
  line = line.substr(0, last);
  LogLine out;
  const auto file = TakeNumber(&line, 10);
  const auto begin = TakeNumber(&line, 10);
  const auto end = TakeNumber(&line, 10);
  if (!file || !begin || !end || *file >= files.size() || *begin >= *end ||
      *end > files[*file].bytes || *begin % kDataAlignment != 0 ||
      (*end % kDataAlignment != 0 && *end != files[*file].bytes)) {
    return std::nullopt;
  }
  out.file = *file;
  out.range.bytes = {*begin, *end};
  while (const auto part = TakeNumber(&line, 16)) {
    out.range.crc32c.push_back(static_cast<uint32_t>(*part));
  }
  if (!line.empty() ||
      out.range.crc32c.size() != SegmentCount(out.range.bytes)) {
    return std::nullopt;
  }
  return out;
}

// Whether the bytes are what was written.
Result<bool> IsThere(const File& file, const WrittenRange& range,
                     MutableByteSpan buffer) {
  uint64_t at = range.bytes.begin;
  for (const uint32_t crc : range.crc32c) {
    const uint64_t end =
        std::min(range.bytes.end, RoundDown(at, kSegmentBytes) + kSegmentBytes);
    const MutableByteSpan bytes = buffer.first(end - at);
    TC_RETURN_IF_ERROR(file.ReadExact(bytes, at));
    if (Crc32c(0, bytes.data(), bytes.size()) != crc) return false;
    at = end;
  }
  return true;
}

// Of what a log says of one file, what its bytes confirm, ascending and apart.
Status KeepConfirmed(const Directory& staging, const OutputSpec& spec,
                     std::vector<WrittenRange>* ranges) {
  Result<File> file = staging.OpenFile(spec.staged, {.write = true});
  uint64_t bytes = 0;
  if (file.ok()) {
    TC_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
    bytes = info.bytes;
  }
  if (bytes != spec.bytes) {  // nothing of it counts
    ranges->clear();
    return {};
  }
  std::vector<char> good(ranges->size(), 0);
  TC_RETURN_IF_ERROR(ForEachItem(
      kReaders, static_cast<int64_t>(ranges->size()), nullptr,
      [&](int64_t item, int) -> Status {
        const auto i = static_cast<size_t>(item);
        TC_ASSIGN_OR_RETURN(const ArenaLease buffer,
                            Arena::Process().Lease(kSegmentBytes, kPatience));
        TC_ASSIGN_OR_RETURN(good[i],
                            IsThere(*file, (*ranges)[i], buffer.span()));
        return {};
      }));
  std::vector<WrittenRange> kept;
  for (size_t i = 0; i < ranges->size(); ++i) {
    if (good[i]) kept.push_back(std::move((*ranges)[i]));
  }
  std::sort(kept.begin(), kept.end(),
            [](const WrittenRange& a, const WrittenRange& b) {
              return a.bytes.begin < b.bytes.begin;
            });
  // What two logs say of the same bytes counts once.
  uint64_t end = 0;
  std::erase_if(kept, [&end](const WrittenRange& range) {
    if (range.bytes.begin < end) return true;
    end = range.bytes.end;
    return false;
  });
  *ranges = std::move(kept);
  if (ranges->empty()) return {};
  return file->Sync();
}

}  // namespace

Result<std::string> MergeIdentity(const MergePlan& plan) {
  const Checkpoint& checkpoint = plan.checkpoint();
  std::ostringstream out;
  out << checkpoint.path() << '\n' << checkpoint.save_id() << '\n';
  if (!checkpoint.manifest()) {
    for (const CatalogFile& file : checkpoint.catalog().files()) {
      TC_ASSIGN_OR_RETURN(const File opened,
                          checkpoint.OpenFile(file.name, false));
      TC_ASSIGN_OR_RETURN(const FileInfo info, opened.Stat());
      out << file.name << ' ' << info.bytes << ' ' << info.inode << ' '
          << info.modified_ns << '\n';
    }
  }
  for (size_t f = 0; f < plan.outputs().size(); ++f) {
    const OutputSpec& spec = plan.outputs()[f];
    // With another key mapping the same outputs have other tensors' bytes.
    std::string sources;
    for (const MergePlan::Extent& extent : plan.extents(f)) {
      PutVarint(&sources, extent.begin);
      PutVarint(&sources, extent.kind);
      PutVarint(&sources, extent.index);
      PutVarint(&sources, extent.from);
    }
    out << spec.name << ' ' << spec.bytes << ' ' << spec.id << ' '
        << CrcOf(plan.header(f)) << ' ' << CrcOf(sources) << '\n';
  }
  return std::move(out).str();
}

Status WriteMergeMark(const Directory& staging, const MergeMark& mark) {
  std::string text(kMarkMagic);
  PutString(&text, mark.identity);
  PutVarint(&text, mark.ids.size());
  for (const std::string& id : mark.ids) PutString(&text, id);
  PutCrc(&text);
  return staging.WriteFile(std::string(kMarkName), text);
}

std::optional<MergeMark> ReadMergeMark(const Directory& staging) {
  const Result<std::string> text =
      staging.ReadFile(std::string(kMarkName), kMaxIdentityBytes);
  if (!text.ok()) return std::nullopt;
  const Result<ByteSpan> body =
      BinaryBody(AsBytes(*text), kMarkMagic, "merge plan");
  if (!body.ok()) return std::nullopt;
  BinaryReader in(*body);
  MergeMark mark;
  auto identity = in.String(kMaxIdentityBytes);
  const auto count = in.Bounded(in.left());
  if (!identity || !count) return std::nullopt;
  mark.identity = std::move(*identity);
  for (uint64_t i = 0; i < *count; ++i) {
    auto id = in.String(kMaxNameBytes);
    if (!id || !IsId(*id)) return std::nullopt;
    mark.ids.push_back(std::move(*id));
  }
  if (!in.empty()) return std::nullopt;
  return mark;
}

bool IsMergeLog(std::string_view name) {
  return name == kMarkName || name.starts_with(kLogPrefix);
}

MergeLog::MergeLog(MergeLog&& other) noexcept
    : file_(std::move(other.file_)), end_(other.end_.load()) {}

Result<MergeLog> MergeLog::Create(const Directory& staging) {
  TC_ASSIGN_OR_RETURN(File file,
                      staging.OpenFile(std::string(kLogPrefix) + NewId(),
                                       {.write = true, .create_new = true}));
  return MergeLog(std::move(file));
}

Status MergeLog::Add(size_t file, const WrittenRange& range) {
  const std::string line = LineText(file, range);
  return file_.WriteAll(AsBytes(line), end_.fetch_add(line.size()));
}

Result<std::vector<std::vector<WrittenRange>>> ReadMergeLogs(
    const Directory& staging, const std::vector<OutputSpec>& files) {
  std::vector<std::vector<WrittenRange>> kept(files.size());
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, staging.List());
  for (const std::string& name : names) {
    if (!name.starts_with(kLogPrefix)) continue;
    TC_ASSIGN_OR_RETURN(const std::string text,
                        staging.ReadFile(name, kMaxLogBytes));
    std::string_view rest = text;
    for (size_t end; (end = rest.find('\n')) != rest.npos;
         rest.remove_prefix(end + 1)) {
      if (auto line = ParseLine(rest.substr(0, end), files)) {
        kept[line->file].push_back(std::move(line->range));
      }
    }
  }
  // One file at a time: there may be more than a process may have open.
  for (size_t f = 0; f < files.size(); ++f) {
    if (kept[f].empty()) continue;
    TC_RETURN_IF_ERROR(KeepConfirmed(staging, files[f], &kept[f]));
  }
  return kept;
}

}  // namespace torch_ckpt
