#include "os/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "os/call.h"

namespace torch_ckpt {
namespace {

constexpr int kLookMs = 50;
constexpr uint64_t kMaxMessage = uint64_t{1} << 30;

// A zero before the name makes it an abstract one.
Result<socklen_t> AddressOf(const std::string& name, sockaddr_un* address) {
  std::memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address->sun_path) {
    return Internal("the name of a socket is too long").WithFile(name);
  }
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                name.size());
}

Result<File> Open(const std::string& name) {
  const int fd = internal::SystemCall("socket", name, [] {
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  });
  if (fd < 0) return Status::Io(errno, "socket", name);
  return File(fd, name);
}

bool IsOwnUser(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

// Whether there is something to read (POLLIN), room to write (POLLOUT), or an
// end, after so long at most.
bool Ready(int fd, short what, int wait_ms) {
  pollfd look{fd, what, 0};
  return poll(&look, 1, wait_ms) > 0;
}

Status Gone(const std::string& name) {
  return Incomplete("the process at the other end is gone").WithFile(name);
}

}  // namespace

Result<std::optional<LocalSocket>> LocalSocket::Connect(
    const std::string& name) {
  sockaddr_un address;
  TC_ASSIGN_OR_RETURN(const socklen_t size, AddressOf(name, &address));
  TC_ASSIGN_OR_RETURN(File file, Open(name));
  const int connected = internal::SystemCall("connect", name, [&] {
    return connect(file.fd(), reinterpret_cast<sockaddr*>(&address), size);
  });
  if (connected != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN) {
      return std::optional<LocalSocket>();
    }
    return Status::Io(errno, "connect", name);
  }
  if (!IsOwnUser(file.fd())) {
    return Conflict("somebody else listens there").WithFile(name);
  }
  LocalSocket made(-1, name);
  made.file_ = std::move(file);
  return std::optional<LocalSocket>(std::move(made));
}

LocalSocket::~LocalSocket() {
  if (file_.valid()) (void)shutdown(file_.fd(), SHUT_RDWR);
}

Status LocalSocket::Send(const std::string& text,
                         const StillWanted& still_wanted,
                         int descriptor) const {
  std::string whole(sizeof(uint64_t), '\0');
  const uint64_t length = text.size();
  std::memcpy(whole.data(), &length, sizeof length);
  whole += text;
  size_t sent = 0;
  while (sent < whole.size()) {
    iovec part{whole.data() + sent, whole.size() - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (descriptor >= 0 && sent == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    while (!Ready(file_.fd(), POLLOUT, kLookMs)) {
      TC_RETURN_IF_ERROR(still_wanted());
    }
    const ssize_t count = internal::SystemCall("sendmsg", file_.path(), [&] {
      return sendmsg(file_.fd(), &message, MSG_NOSIGNAL);
    });
    if (count < 0) {
      if (errno == EAGAIN) continue;
      if (errno == EPIPE || errno == ECONNRESET) return Gone(file_.path());
      return Status::Io(errno, "sendmsg", file_.path());
    }
    sent += static_cast<size_t>(count);
  }
  return {};
}

Status LocalSocket::ReadExact(char* out, size_t bytes, File* descriptor,
                              const StillWanted& still_wanted) const {
  while (bytes > 0) {
    while (!Ready(file_.fd(), POLLIN, kLookMs)) {
      TC_RETURN_IF_ERROR(still_wanted());
    }
    iovec part{out, bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t count = internal::SystemCall("recvmsg", file_.path(), [&] {
      return recvmsg(file_.fd(), &message, MSG_CMSG_CLOEXEC);
    });
    if (count == 0 || (count < 0 && errno == ECONNRESET)) {
      return Gone(file_.path());
    }
    if (count < 0 && errno == EAGAIN) continue;
    if (count < 0) return Status::Io(errno, "recvmsg", file_.path());
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
        continue;
      }
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      *descriptor = File(fd, file_.path());
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0) {
      return Exhausted(
                 "out of descriptors: this process cannot take in the one that "
                 "was sent (see ulimit -n)")
          .WithFile(file_.path());
    }
    out += count;
    bytes -= static_cast<size_t>(count);
  }
  return {};
}

Result<LocalMessage> LocalSocket::Receive(
    const StillWanted& still_wanted) const {
  LocalMessage message;
  uint64_t length = 0;
  TC_RETURN_IF_ERROR(ReadExact(reinterpret_cast<char*>(&length), sizeof length,
                               &message.descriptor, still_wanted));
  if (length > kMaxMessage) {
    return Corrupt("a message is too long").WithFile(file_.path());
  }
  message.text.resize(length);
  TC_RETURN_IF_ERROR(ReadExact(message.text.data(), length, &message.descriptor,
                               still_wanted));
  return message;
}

bool LocalSocket::PeerIsGone() const {
  if (!Ready(file_.fd(), POLLIN, 0)) return false;
  char next;
  const ssize_t count = recv(file_.fd(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

Result<LocalListener> LocalListener::Listen(const std::string& name) {
  sockaddr_un address;
  TC_ASSIGN_OR_RETURN(const socklen_t size, AddressOf(name, &address));
  TC_ASSIGN_OR_RETURN(File file, Open(name));
  if (internal::SystemCall("bind", name, [&] {
        return bind(file.fd(), reinterpret_cast<sockaddr*>(&address), size);
      }) != 0) {
    if (errno == EADDRINUSE) {
      return Conflict("somebody listens there").WithFile(name);
    }
    return Status::Io(errno, "bind", name);
  }
  if (internal::SystemCall("listen", name,
                           [&] { return listen(file.fd(), SOMAXCONN); }) != 0) {
    return Status::Io(errno, "listen", name);
  }
  return LocalListener(std::move(file));
}

Result<LocalSocket> LocalListener::Accept(
    const StillWanted& still_wanted) const {
  for (;;) {
    TC_RETURN_IF_ERROR(still_wanted());
    if (!Ready(file_.fd(), POLLIN, kLookMs)) continue;
    const int fd = internal::SystemCall("accept4", file_.path(), [&] {
      return accept4(file_.fd(), nullptr, nullptr,
                     SOCK_CLOEXEC | SOCK_NONBLOCK);
    });
    if (fd < 0) {
      if (errno == ECONNABORTED || errno == EAGAIN) continue;
      return Status::Io(errno, "accept4", file_.path());
    }
    LocalSocket socket(fd, file_.path());
    if (IsOwnUser(fd)) return socket;
  }
}

}  // namespace torch_ckpt
