// Bytes to be written: the door between jobs and storage, as ByteSource is.
//
// A sink has its size from the start, and its bytes come in any order, from
// several threads and several processes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "os/directory.h"
#include "os/transfer_file.h"

namespace torch_ckpt {

class ByteSink {
 public:
  // Makes a file of `bytes` bytes, its blocks reserved where the file system
  // can: a full disk is an error now, and not at the last byte. So is a name
  // that is taken.
  static Status Create(const Directory& directory, const std::string& name,
                       uint64_t bytes);
  // Opens one that was made with `bytes` bytes. Without `direct_io` all goes
  // through the page cache.
  static Result<std::unique_ptr<ByteSink>> Open(const Directory& directory,
                                                const std::string& name,
                                                uint64_t bytes, bool direct_io);

  const std::string& path() const { return file_.path(); }
  uint64_t size() const { return size_; }
  // May be called from several threads for bytes that do not overlap. The last
  // bytes of the file may wait for Close.
  Status Write(ByteSpan data, uint64_t offset);
  // Writes what waits; with `sync` all is durable then. REQUIRES: nobody writes
  // any more. Nothing of an error may be taken for written.
  Status Close(bool sync);

 private:
  ByteSink(File file, uint64_t size, bool direct_io)
      : file_(std::move(file), /*writable=*/true, direct_io), size_(size) {}
  Status WriteCached(ByteSpan data, uint64_t offset);

  internal::TransferFile file_;
  const uint64_t size_;
  std::mutex mutex_;
  std::vector<std::byte> tail_;  // the end of the file, where it waits
};

}  // namespace torch_ckpt
