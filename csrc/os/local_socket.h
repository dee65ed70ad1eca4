// Connections between processes of one machine and one user: messages, each
// with a descriptor if wanted. Names are abstract ones (unix(7)): nothing is
// left of them, and processes of other network namespaces do not see them.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt {

// Asked now and then by whatever waits: an error ends the waiting.
using StillWanted = std::function<Status()>;

struct LocalMessage {
  std::string text;
  File descriptor;  // not valid where none was sent
};

// Movable, not copyable; one thread at a time, but for PeerIsGone.
class LocalSocket {
 public:
  LocalSocket(LocalSocket&&) noexcept = default;
  LocalSocket& operator=(LocalSocket&&) noexcept = default;
  // Hangs up, although a child that was forked meanwhile may hold it open.
  ~LocalSocket();

  // Nothing where nobody listens there (yet). kConflict for one that belongs to
  // another user.
  static Result<std::optional<LocalSocket>> Connect(const std::string& name);

  // Waits until it is on its way. kIncomplete where the peer is gone.
  Status Send(const std::string& text, const StillWanted& still_wanted,
              int descriptor = -1) const;
  // Waits for the next message. kIncomplete where the peer is gone, kExhausted
  // where this process has no room for the descriptor that came with it.
  Result<LocalMessage> Receive(const StillWanted& still_wanted) const;
  // Whether the peer has ended or closed its end, and nothing is left to read.
  bool PeerIsGone() const;

 private:
  friend class LocalListener;
  LocalSocket(int fd, const std::string& name) : file_(fd, name) {}
  Status ReadExact(char* out, size_t bytes, File* descriptor,
                   const StillWanted& still_wanted) const;

  File file_;
};

class LocalListener {
 public:
  // kConflict where somebody listens under this name already.
  static Result<LocalListener> Listen(const std::string& name);
  // Waits for the next connection of a process of this user; others are closed.
  Result<LocalSocket> Accept(const StillWanted& still_wanted) const;

 private:
  explicit LocalListener(File file) : file_(std::move(file)) {}
  File file_;
};

}  // namespace torch_ckpt
