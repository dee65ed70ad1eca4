#include "os/byte_sink.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

// Files below this are cheaper through the page cache.
constexpr uint64_t kMinDirectFile = uint64_t{1} << 20;

}  // namespace

Status ByteSink::Create(const Directory& directory, const std::string& name,
                        uint64_t bytes) {
  TC_ASSIGN_OR_RETURN(
      File file, directory.OpenFile(name, {.write = true, .create_new = true}));
  TC_ASSIGN_OR_RETURN(const bool reserved, file.Allocate(bytes));
  if (!reserved) TC_RETURN_IF_ERROR(file.Truncate(bytes));
  return file.Close();
}

Result<std::unique_ptr<ByteSink>> ByteSink::Open(const Directory& directory,
                                                 const std::string& name,
                                                 uint64_t bytes,
                                                 bool direct_io) {
  TC_ASSIGN_OR_RETURN(File file, directory.OpenFile(name, {.write = true}));
  return std::unique_ptr<ByteSink>(new ByteSink(
      std::move(file), bytes, direct_io && bytes >= kMinDirectFile));
}

Status ByteSink::WriteCached(ByteSpan data, uint64_t offset) {
  if (data.empty()) return {};
  return file_.Cached(
      [&](const File& file) { return file.WriteAll(data, offset); });
}

Status ByteSink::Write(ByteSpan data, uint64_t offset) {
  const uint64_t end = offset + data.size();
  const uint64_t unit = file_.DirectUnit(data.data(), /*keep_cached=*/false);
  if (unit == 0) return WriteCached(data, offset);
  // Whole units go past the cache. An edge inside the file is there only where
  // a unit is larger than what files are divided by.
  const uint64_t begin = std::min(end, RoundUp(offset, unit));
  const uint64_t until = std::max(begin, RoundDown(end, unit));
  uint64_t done = begin;
  TC_RETURN_IF_ERROR(WriteCached(data.first(begin - offset), offset));
  const ByteSpan whole = data.subspan(begin - offset, until - begin);
  if (!whole.empty() && file_.DirectUnit(whole.data(), false) != 0) {
    TC_ASSIGN_OR_RETURN(const internal::DirectMoved moved,
                        file_.WriteDirect(whole, begin));
    done += moved.bytes;
  }
  const ByteSpan rest = data.subspan(done - offset);
  if (rest.size() < unit && end == size_) {
    std::lock_guard<std::mutex> lock(mutex_);
    tail_.assign(rest.begin(), rest.end());
    return {};
  }
  return WriteCached(rest, done);
}

Status ByteSink::Close(bool sync) {
  if (!tail_.empty()) {
    // Less than a unit. Now that nobody else uses the descriptor, it may go
    // over to the cache for it.
    TC_RETURN_IF_ERROR(file_.GiveUp());
    TC_RETURN_IF_ERROR(WriteCached(tail_, size_ - tail_.size()));
  }
  if (sync) TC_RETURN_IF_ERROR(file_.file().Sync());
  return file_.Close();
}

}  // namespace torch_ckpt
