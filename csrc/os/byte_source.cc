#include "os/byte_source.h"

#include <algorithm>
#include <optional>
#include <string>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

// Below this a direct read costs a disk round trip for little; readahead of
// the page cache serves runs of small reads better.
constexpr uint64_t kMinDirectRead = uint64_t{256} << 10;
// Calls that take a file for not cached after one has found it so, where the
// kernel does not say.
constexpr int kCallsAfterMiss = 16;

}  // namespace

Result<uint64_t> ByteSource::ReadCached(MutableByteSpan out,
                                        uint64_t offset) const {
  // Several threads may count at once: a look more or less is no harm.
  if (missed_) {
    const std::optional<bool> there = file_.file().IsCached(offset, out.size());
    if (there && !*there) return uint64_t{0};
    if (!there && skip_ > 0) {
      --skip_;
      return uint64_t{0};
    }
  }
  TC_ASSIGN_OR_RETURN(const uint64_t cached, file_.Cached([&](const File& f) {
    return f.ReadCached(out, offset);
  }));
  if (cached > 0) used_cache_ = true;
  missed_ = cached < out.size();
  if (missed_) skip_ = kCallsAfterMiss;
  return cached;
}

Result<const std::byte*> ByteSource::Read(uint64_t lo, uint64_t hi,
                                          MutableByteSpan scratch,
                                          Readers readers) const {
  // Bytes stand in scratch as in the file, which suits every unit.
  const uint64_t first = RoundDown(lo, internal::kMaxDirectUnit);
  if (RoundUp(hi, internal::kMaxDirectUnit) - first > scratch.size()) {
    return Internal("bytes from " + std::to_string(lo) + " to " +
                    std::to_string(hi) + " do not fit in a buffer of " +
                    std::to_string(scratch.size()) +
                    ": this is a bug of torch_ckpt")
        .WithFile(path());
  }
  std::byte* const at = scratch.data() + (lo - first);
  uint64_t done = lo;
  const auto read_cached_way = [&]() -> Status {
    return file_.Cached([&](const File& f) {
      return f.ReadExact({at + (done - lo), hi - done}, done);
    });
  };
  if (readers == Readers::kThisProcess) {
    TC_ASSIGN_OR_RETURN(const uint64_t cached, ReadCached({at, hi - lo}, lo));
    done += cached;
    if (done == hi) return at;
  }
  if (readers == Readers::kSeveral || hi - done < kMinDirectRead) {
    TC_RETURN_IF_ERROR(read_cached_way());
    return at;
  }
  const uint64_t unit = file_.DirectUnit(scratch.data(), used_cache_);
  if (unit != 0) {
    const uint64_t begin = RoundDown(done, unit);
    TC_ASSIGN_OR_RETURN(const internal::DirectMoved moved,
                        file_.ReadDirect({scratch.data() + (begin - first),
                                          RoundUp(hi, unit) - begin},
                                         begin, hi - begin));
    done = std::max(done, begin + moved.bytes);
  }
  if (done < hi) TC_RETURN_IF_ERROR(read_cached_way());
  return at;
}

Result<const std::byte*> StepReader::Next(uint64_t at, uint64_t size) {
  // Others take each step from the cache as well: none is left for later.
  if (readers_ == Readers::kSeveral) {
    return source_.Read(at, at + size, scratch_, readers_);
  }
  if (rest_) return rest_ + (at - rest_at_);
  TC_ASSIGN_OR_RETURN(const uint64_t cached,
                      source_.ReadCached(scratch_.first(size), at));
  return cached == size ? scratch_.data() : nullptr;
}

Status StepReader::FetchRest(uint64_t at) {
  TC_ASSIGN_OR_RETURN(rest_, source_.Read(at, end_, scratch_));
  rest_at_ = at;
  return {};
}

}  // namespace torch_ckpt
