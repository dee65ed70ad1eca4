// The files of a set while jobs read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/open/file_set.h"
#include "os/byte_source.h"

namespace torch_ckpt {

// Opens files on demand, each at its first use, and keeps as many of them open
// as this process may have and the rest of it can spare. All functions may be
// called from any thread; no file waits until another one is open.
class OpenFiles {
 public:
  OpenFiles(std::shared_ptr<const FileSet> set, bool direct_io);

  const FileSet& set() const { return *set_; }

  // By its position in the set. Stays good while it is held, whatever is closed
  // here meanwhile. The errors of FileSet::OpenFile; after one the next call
  // tries again.
  Result<std::shared_ptr<const ByteSource>> Get(uint32_t file);
  // FileSet::UntilSure of what `step` does with that file, which is opened
  // anew before each time but the first.
  Status Read(uint32_t file,
              const std::function<Status(const ByteSource&)>& step);
  // FileSet::CheckUnchanged of every file that was opened, when all is read.
  Status CheckUnchanged();

 private:
  struct FileState {
    std::mutex opening;  // the thread that opens it has this
    // What it was when its id was compared: opening it again need not.
    std::optional<FileInfo> known;
    bool used = false;  // it was opened once
    std::shared_ptr<const ByteSource> source;
    // In recent_, where there is a source.
    std::list<FileState*>::iterator place;
  };

  // The source of an open one, which counts as used.
  std::shared_ptr<const ByteSource> Use(FileState* state);
  Result<std::shared_ptr<const ByteSource>> Open(uint32_t file);
  void Forget(uint32_t file);
  // Closes at most `count`, those first that were not used for longest.
  void CloseSome(size_t count);

  const std::shared_ptr<const FileSet> set_;
  const bool direct_io_;
  const uint64_t most_;  // descriptors that the sources of this process hold
  std::mutex mutex_;     // guards all but what `opening` does
  std::vector<FileState> states_;  // one for each file, all made at once
  std::list<FileState*> recent_;   // open, most recently used first
};

}  // namespace torch_ckpt
