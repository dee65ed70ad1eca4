// Who makes the bytes of an output: memory of this process, of a device or of
// another rank, a stored tensor, a text. A new kind of source is one more
// provider, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/write/extents.h"
#include "engine/write/fill_buffer.h"
#include "runtime/arena.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// Bytes of one thing that a provider is asked for, and where they go.
struct Stretch {
  uint64_t index = 0;  // of the thing
  uint64_t from = 0;   // of its bytes
  uint64_t bytes = 0;
  uint64_t at = 0;  // in the buffer that is filled
};

// Its functions may be called from several threads at once, those that take a
// buffer or a worker for different workers.
class Provider {
 public:
  Provider() = default;
  virtual ~Provider() = default;
  Provider(const Provider&) = delete;
  Provider& operator=(const Provider&) = delete;

  // Memory that Fill wants for itself until it returns, beside the buffer.
  virtual uint64_t ScratchBytes() const { return 0; }
  // Who page-locks buffers for the device that fills them; null: nobody.
  virtual PageLocker* Locker() const { return nullptr; }
  // Where these bytes already are, in a row, in host memory that stays as it is
  // until the job is done; null where they are not.
  virtual const std::byte* Find(const Stretch&) const { return nullptr; }
  // Waits until Fill would not have to wait for somebody else. Called before
  // memory is taken for a buffer: those who wait hold none.
  virtual Status Await(const std::vector<Stretch>&, const Job&) { return {}; }
  // Makes the bytes of `stretches`, which ascend, in the buffer, or begins to:
  // they are there when Finish has returned, and are counted as Filled when
  // this returns. `scratch` begins at a multiple of
  // kScratchAlignment.
  virtual Status Fill(const std::vector<Stretch>& stretches,
                      MutableByteSpan scratch, FillBuffer* buffer) = 0;
  // Returns when nothing that this worker has begun goes on any more, whatever
  // it returns.
  virtual Status Finish(int) { return {}; }
};

inline constexpr uint64_t kScratchAlignment = uint64_t{64} << 10;

}  // namespace torch_ckpt
