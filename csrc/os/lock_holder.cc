#include "os/lock_holder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <sstream>

#include "os/call.h"
#include "os/machine.h"

namespace torch_ckpt {
namespace {

// The kernel gives the first process space this number (PROC_PID_INIT_INO).
constexpr const char* kFirstPidSpace = "4026531836";

std::string Word(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (char& c : text) {
    if (c <= ' ' || c > '~') c = '?';
  }
  return text.empty() ? "-" : text;
}

// When the process began: field 22, counted behind the command, which may hold
// any character.
std::string StartTime(const std::string& pid) {
  const std::string stat = ReadSystemFile("/proc/" + pid + "/stat");
  const size_t paren = stat.rfind(')');
  if (paren == std::string::npos) return "-";
  std::istringstream rest(stat.substr(paren + 1));
  std::string word;
  for (int field = 3; field <= 22; ++field) {
    if (!(rest >> word)) return "-";
  }
  return word;
}

bool Same(const std::string& a, const std::string& b) {
  return a == b && a != "-";
}

}  // namespace

std::string LockHolder::ToText() const {
  std::string text;
  for (const std::string* word :
       {&host, &machine, &boot, &pid_space, &pid, &start, &nonce}) {
    text += *word + "\n";
  }
  return text;
}

std::string LockHolder::Name() const {
  return "process " + pid + " on host " + host;
}

LockHolder ThisProcess() {
  static std::atomic<uint64_t> count{0};
  LockHolder self;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  self.host = Word(host.data());
  self.machine = Word(ReadSystemFile("/etc/machine-id"));
  self.boot = Word(ReadSystemFile("/proc/sys/kernel/random/boot_id"));
  struct stat space;
  // Two containers of one host may share its name, but not their process ids.
  const char* const kSpace = "/proc/self/ns/pid";
  const bool known = internal::SystemCall("fstatat", kSpace, [&] {
                       return fstatat(AT_FDCWD, kSpace, &space, 0);
                     }) == 0;
  self.pid_space = known ? std::to_string(space.st_ino) : "-";
  self.pid = std::to_string(getpid());
  self.start = StartTime(self.pid);
  self.nonce =
      self.pid + "-" +
      std::to_string(
          std::chrono::system_clock::now().time_since_epoch().count()) +
      "-" + std::to_string(++count);
  return self;
}

std::optional<LockHolder> ParseLockHolder(const std::string& text) {
  // A file cut short by a crash must not pass as a whole one.
  if (text.empty() || text.back() != '\n') return std::nullopt;
  std::istringstream in(text);
  LockHolder holder;
  if (!(in >> holder.host >> holder.machine >> holder.boot >>
        holder.pid_space >> holder.pid >> holder.start >> holder.nonce) ||
      holder.nonce.find('/') != std::string::npos) {
    return std::nullopt;
  }
  return holder;
}

bool ProvablyDead(const LockHolder& holder) {
  const LockHolder self = ThisProcess();
  if (!Same(holder.boot, self.boot)) {
    return holder.boot != "-" && self.boot != "-" &&
           Same(holder.host, self.host) && Same(holder.machine, self.machine) &&
           holder.pid_space == kFirstPidSpace &&
           self.pid_space == kFirstPidSpace;
  }
  if (!Same(holder.pid_space, self.pid_space)) return false;
  int pid = 0;
  const char* end = holder.pid.data() + holder.pid.size();
  const auto parsed = std::from_chars(holder.pid.data(), end, pid);
  if (parsed.ec != std::errc() || parsed.ptr != end || pid <= 0) return false;
  if (kill(pid, 0) != 0) return errno == ESRCH;
  const std::string start = StartTime(holder.pid);
  return start != "-" && holder.start != "-" && start != holder.start;
}

}  // namespace torch_ckpt
