#include "engine/read/range_crc32.h"

#include <algorithm>

#include "runtime/arena.h"
#include "runtime/crc32.h"

namespace torch_ckpt {

Result<uint32_t> Crc32OfRange(const ByteSource& source, ByteRange range,
                              Job* job,
                              const std::function<void(uint64_t)>& done) {
  constexpr uint64_t kAtOnce = uint64_t{8} << 20;
  TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                      LeaseBuffer(kAtOnce + ByteSource::kSlack, job));
  uint32_t crc = 0;
  for (uint64_t at = range.begin; at < range.end; at += kAtOnce) {
    if (job->cancelled()) return Cancelled("the job was cancelled");
    const uint64_t to = std::min(at + kAtOnce, range.end);
    TC_ASSIGN_OR_RETURN(const std::byte* const bytes,
                        source.Read(at, to, lease.span()));
    crc = Crc32(crc, bytes, to - at);
    done(to - at);
  }
  return crc;
}

}  // namespace torch_ckpt
