#include "engine/open/torch_archive.h"

#include <algorithm>
#include <utility>

#include "plan/copy_run.h"
#include "plan/runs.h"
#include "runtime/crc32.h"

namespace torch_ckpt {
namespace {

// What is read of each end at once: of a box that DCP saved, all but the
// elements.
constexpr uint64_t kEnd = 4096;
constexpr uint64_t kMaxElementBytes = uint64_t{128} << 20;
constexpr std::string_view kPickleName = "data.pkl";

Status Foreign(const std::string& what) {
  return Corrupt("the torch.save archive " + what);
}

Status TooLarge(const char* what, uint64_t most) {
  return Exhausted(std::string("the torch.save archive has a ") + what +
                   " of more than " + std::to_string(most) + " bytes");
}

}  // namespace

Result<std::string> TorchArchive::Read(uint64_t offset, uint64_t bytes) const {
  if (offset > range_.size() || bytes > range_.size() - offset) {
    return Foreign("ends too early");
  }
  if (offset + bytes <= head_.size()) return head_.substr(offset, bytes);
  const uint64_t tail = range_.size() - tail_.size();
  if (offset >= tail) return tail_.substr(offset - tail, bytes);
  std::string out(bytes, '\0');
  TC_RETURN_IF_ERROR(
      file_->ReadExact({reinterpret_cast<std::byte*>(out.data()), out.size()},
                       range_.begin + offset));
  return out;
}

Result<std::string> TorchArchive::ReadEntry(const ZipEntry& entry) const {
  TC_ASSIGN_OR_RETURN(const std::string header,
                      Read(entry.header, kZipLocalHeader));
  TC_ASSIGN_OR_RETURN(const uint64_t begin,
                      ZipContentBegin(AsBytes(header), entry, directory_));
  TC_ASSIGN_OR_RETURN(std::string content, Read(begin, entry.bytes));
  // Who saves without them writes 0.
  if (entry.crc32 != 0 &&
      Crc32(0, content.data(), content.size()) != entry.crc32) {
    return Foreign("has an entry " + std::string(entry.name) +
                   " that does not match its CRC-32");
  }
  return content;
}

Status TorchArchive::ReadDirectory(uint64_t most) {
  const uint64_t end = std::min(range_.size(), kEnd);
  TC_ASSIGN_OR_RETURN(tail_, Read(range_.size() - end, end));
  TC_ASSIGN_OR_RETURN(head_, Read(0, end));
  if (!EndsWithoutComment(AsBytes(tail_))) {
    const uint64_t more =
        std::min<uint64_t>(range_.size(), kZipTail + kMaxZipComment);
    TC_ASSIGN_OR_RETURN(tail_, Read(range_.size() - more, more));
  }
  TC_ASSIGN_OR_RETURN(directory_,
                      FindZipDirectory(AsBytes(tail_), range_.size()));
  if (directory_.bytes > most) return TooLarge("directory", most);
  TC_ASSIGN_OR_RETURN(std::string names,
                      Read(directory_.begin, directory_.bytes));
  names_ = std::make_shared<const std::string>(std::move(names));
  TC_ASSIGN_OR_RETURN(const std::vector<ZipEntry> entries,
                      ParseZipDirectory(AsBytes(*names_), directory_));
  // As torch: everything is below what the first name begins with.
  const std::string_view first = entries.empty() ? "" : entries[0].name;
  stem_ = first.substr(0, first.find('/') + 1);
  for (const ZipEntry& entry : entries) {
    if (!entries_.try_emplace(entry.name, entry).second) {
      return Foreign("has the entry " + std::string(entry.name) + " twice");
    }
  }
  return {};
}

Status TorchArchive::ReadPickle(uint64_t most) {
  const auto pickle = entries_.find(stem_ + std::string(kPickleName));
  if (stem_.empty() || pickle == entries_.end()) {
    return Foreign("has no data.pkl");
  }
  // Who wrote none wrote what this machine has.
  const auto order = entries_.find(stem_ + "byteorder");
  if (order != entries_.end()) {
    constexpr std::string_view kOurs = "little";
    std::string text;
    if (order->second.bytes == kOurs.size()) {
      TC_ASSIGN_OR_RETURN(text, ReadEntry(order->second));
    }
    if (text != kOurs) {
      return Unsupported("the torch.save archive has another byte order");
    }
  }
  if (pickle->second.bytes > most) return TooLarge("pickle", most);
  TC_ASSIGN_OR_RETURN(std::string text, ReadEntry(pickle->second));
  text_ = std::make_shared<const std::string>(std::move(text));
  TC_ASSIGN_OR_RETURN(pickle_,
                      Pickle::Parse(AsBytes(*text_), UnknownNames::kRecord));
  return {};
}

Result<TorchArchive> TorchArchive::Open(const File& file, ByteRange range,
                                        uint64_t most) {
  TorchArchive out(file, range);
  TC_RETURN_IF_ERROR(out.ReadDirectory(most));
  TC_RETURN_IF_ERROR(out.ReadPickle(most));
  return out;
}

Result<std::vector<ZipContent>> TorchArchive::Contents() const {
  std::vector<ZipContent> out;
  std::vector<std::pair<uint64_t, uint64_t>> spans;  // begin, end in the file
  for (const auto& [name, entry] : entries_) {
    TC_ASSIGN_OR_RETURN(const std::string header,
                        Read(entry.header, kZipLocalHeader));
    TC_ASSIGN_OR_RETURN(const uint64_t begin,
                        ZipContentBegin(AsBytes(header), entry, directory_));
    ZipContent& content = out.emplace_back();
    content.name = name;
    content.range = ByteRange::Of(range_.begin + begin, entry.bytes);
    content.crc32 = entry.crc32;
    content.crc32_at.push_back(range_.begin + entry.crc32_at);
    if (entry.described) {
      content.crc32_at.push_back(content.range.begin + entry.bytes +
                                 kZipCrcBehind);
    }
    spans.push_back({range_.begin + entry.header, content.range.end});
  }
  // Who reads all of them reads no byte twice: only their headers say how long
  // these are.
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) {
      return Foreign("has two entries that overlap at byte " +
                     std::to_string(spans[i].first - range_.begin));
    }
  }
  return out;
}

Result<StoredView::Resolved> TorchArchive::Find(
    const TorchTensor& tensor) const {
  const auto entry =
      entries_.find(stem_ + "data/" + std::string(tensor.storage));
  if (entry == entries_.end()) {
    return Foreign("has no storage " + std::string(tensor.storage));
  }
  if (entry->second.bytes / tensor.storage_element_bytes !=
      tensor.storage_elements) {
    return Foreign("has a storage " + std::string(tensor.storage) + " of " +
                   std::to_string(entry->second.bytes) +
                   " bytes, and its pickle says " +
                   std::to_string(tensor.storage_elements) + " elements of " +
                   std::to_string(tensor.storage_element_bytes) +
                   ": they are of different files, or one is damaged");
  }
  if (tensor.end > entry->second.bytes) {
    return Foreign("has a storage of " + std::to_string(entry->second.bytes) +
                   " bytes, and its tensor ends at byte " +
                   std::to_string(tensor.end));
  }
  TC_ASSIGN_OR_RETURN(const std::string header,
                      Read(entry->second.header, kZipLocalHeader));
  TC_ASSIGN_OR_RETURN(
      const uint64_t begin,
      ZipContentBegin(AsBytes(header), entry->second, directory_));
  StoredView::Resolved out;
  out.storage.range = ByteRange::Of(range_.begin + begin, entry->second.bytes);
  out.storage.crc32 = entry->second.crc32;
  out.placement.kind = PlacementKind::kStridedBox;
  out.placement.offset = range_.begin + begin + tensor.begin;
  out.placement.box = Box::Whole(tensor.shape);
  out.placement.strides = tensor.strides;
  return out;
}

Status TorchArchive::CheckStorage(const DigestedRange& storage) const {
  constexpr uint64_t kAtOnce = uint64_t{4} << 20;
  if (storage.crc32 == 0 || !checked_.insert(storage.range.begin).second) {
    return {};
  }
  const uint64_t begin = storage.range.begin - range_.begin;
  const uint64_t end = begin + storage.range.size();
  uint32_t crc = 0;
  for (uint64_t at = begin; at < end; at += kAtOnce) {
    TC_ASSIGN_OR_RETURN(const std::string bytes,
                        Read(at, std::min(kAtOnce, end - at)));
    crc = Crc32(crc, bytes.data(), bytes.size());
  }
  if (crc == storage.crc32) return {};
  return Foreign("has an entry at bytes " + std::to_string(begin) + " to " +
                 std::to_string(end) + " that does not match its CRC-32");
}

Budget TorchArchive::MakeBudget() const {
  constexpr uint64_t kMost = uint64_t{256} << 20;
  // Elements as base64 are a third larger.
  const uint64_t elements = range_.size() < kMost ? 2 * range_.size() : kMost;
  return Budget("the pickle", pickle_.bytes(),
                std::clamp(elements, Budget::kKeptAnyway, kMost));
}

Result<std::string> TorchArchive::Elements(const TorchTensor& tensor,
                                           Budget* budget) const {
  TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                      ByteSize(tensor.dtype, tensor.shape));
  if (bytes > kMaxElementBytes ||
      tensor.end - tensor.begin > kMaxElementBytes) {
    return Unsupported("the object has a tensor above 128 MiB");
  }
  // Views of one storage are read for each of them, and an expanded one makes
  // more than is stored.
  if (!budget->Touch(std::max(bytes, tensor.end - tensor.begin))) {
    return budget->Over();
  }
  std::string out(bytes, '\0');
  if (bytes == 0) return out;
  TC_ASSIGN_OR_RETURN(const StoredView::Resolved placed, Find(tensor));
  TC_RETURN_IF_ERROR(CheckStorage(placed.storage));
  const Placement& found = placed.placement;
  TC_ASSIGN_OR_RETURN(
      const std::string stored,
      Read(found.offset - range_.begin, tensor.end - tensor.begin));
  TC_ASSIGN_OR_RETURN(const UnitView view,
                      InUnits(tensor.dtype, tensor.shape, found.box));
  Run run;
  if (MakeRun({view.box, 0, found.strides},
              {view.box, 0, DenseStrides(view.shape, view.unit_bytes)},
              view.unit_bytes, &run)) {
    CopyRun(run, AsBytes(stored).data(), 0,
            reinterpret_cast<std::byte*>(out.data()), 0);
  }
  return out;
}

}  // namespace torch_ckpt
