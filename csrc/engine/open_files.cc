#include "engine/open_files.h"

#include <optional>

#include "base/checked.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kBlock = 4096;
// Below this a direct read costs a disk round trip for little; readahead of
// the page cache serves runs of small reads better.
constexpr uint64_t kMinDirect = uint64_t{256} << 10;
// Reads that take a file for not cached after one has found it so, where the
// kernel does not say.
constexpr int kReadsAfterMiss = 16;

}  // namespace

Result<uint64_t> SourceFile::ReadCached(MutableByteSpan out,
                                        uint64_t offset) const {
  // Several threads may count at once: a probe more or less is no harm.
  if (missed_) {
    const std::optional<bool> there = buffered_.IsCached(offset, out.size());
    if (there && !*there) return uint64_t{0};
    if (!there && skip_ > 0) {
      --skip_;
      return uint64_t{0};
    }
  }
  TC_ASSIGN_OR_RETURN(const uint64_t cached, buffered_.ReadCached(out, offset));
  missed_ = cached < out.size();
  if (missed_) skip_ = kReadsAfterMiss;
  return cached;
}

Result<const File*> SourceFile::Direct() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!direct_tried_) {
    Result<File> file = checkpoint_->OpenFile(name_, /*direct=*/true);
    if (!file.ok() && file.status().kind() != ErrorKind::kUnsupported) {
      return file.status();
    }
    if (file.ok()) {
      // The name may lead to a file of another save by now.
      TC_ASSIGN_OR_RETURN(const FileInfo now, file->Stat());
      TC_ASSIGN_OR_RETURN(const FileInfo first, buffered_.Stat());
      if (!now.SameFile(first)) {
        return Conflict("is being replaced by a save").WithFile(path());
      }
      direct_ = std::move(file).value();
    }
    direct_tried_ = true;
  }
  return direct_.valid() ? &direct_ : nullptr;
}

Result<const std::byte*> SourceFile::Read(uint64_t lo, uint64_t hi,
                                          MutableByteSpan scratch) const {
  const uint64_t first = RoundDown(lo, kBlock);
  std::byte* const at = scratch.data() + (lo - first);
  TC_ASSIGN_OR_RETURN(const uint64_t cached, ReadCached({at, hi - lo}, lo));
  const uint64_t done = lo + cached;
  if (done == hi) return at;
  const File* direct = nullptr;
  if (hi - done >= kMinDirect) {
    TC_ASSIGN_OR_RETURN(direct, Direct());
  }
  if (!direct) {
    TC_RETURN_IF_ERROR(ReadBuffered({at + cached, hi - done}, done));
    return at;
  }
  // Whole blocks past the cache; the block that the end cuts may be the last
  // of the file, so its bytes come through the cache.
  const uint64_t begin = RoundDown(done, kBlock);
  const uint64_t end = RoundDown(hi, kBlock);
  TC_RETURN_IF_ERROR(direct->ReadExact(
      {scratch.data() + (begin - first), end - begin}, begin));
  if (end < hi) {
    TC_RETURN_IF_ERROR(
        ReadBuffered({scratch.data() + (end - first), hi - end}, end));
  }
  return at;
}

Result<std::shared_ptr<const SourceFile>> OpenFiles::Get(uint32_t file) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto it = by_file_.find(file); it != by_file_.end()) {
    recent_.splice(recent_.begin(), recent_, it->second);
    return recent_.front().second;
  }
  const std::string& name = checkpoint_->files()[file].name;
  TC_ASSIGN_OR_RETURN(File opened, checkpoint_->OpenFile(name, false));
  auto source = std::make_shared<const SourceFile>(checkpoint_.get(), name,
                                                   std::move(opened));
  recent_.emplace_front(file, source);
  by_file_[file] = recent_.begin();
  if (recent_.size() > max_open_) {
    by_file_.erase(recent_.back().first);
    recent_.pop_back();
  }
  return std::shared_ptr<const SourceFile>(source);
}

}  // namespace torch_ckpt
