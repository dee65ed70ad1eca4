// Measures what this machine can do, for the benchmarks to compare with, and
// watches the memory of a process while it works.
//
//   limits memcpy BYTES THREADS        copy between faulted huge pages
//   limits gather BYTES RUN            copy RUN-byte pieces 8 * RUN apart
//   limits first_touch BYTES HUGE      write one byte of each fresh 4 KiB
//   limits write FILE BYTES MODE       8 MiB pieces, then fdatasync; MODE is
//                                      direct, recycled or buffered
//   limits read_cold FILE...           direct reads of files not in memory
//   limits read_warm THREADS FILE...   page cache into faulted huge pages
//   limits touch BYTES                 touch and free memory; nothing timed
//   limits watch PID                   see Watch below
//   limits watch_tree PID              the same with all that PID has started
//
// The timed commands print one line of JSON:
//   {"seconds": S, "cpu_seconds": C, "bytes": N}
// On failure a message goes to stderr and the exit status is 1.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPiece = size_t{8} << 20;
constexpr size_t kSourcePieces = 8;

[[noreturn]] void Fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Anonymous memory, unmapped at the end of its scope.
class Memory {
 public:
  Memory(size_t bytes, bool huge) : bytes_(RoundUp(bytes, size_t{2} << 20)) {
    void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) Fail("mmap");
    data_ = static_cast<char*>(start);
    // A kernel without huge pages refuses; then the pages are small ones.
    madvise(data_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  void Touch() const {
    for (size_t at = 0; at < bytes_; at += kPage) {
      *static_cast<volatile char*>(data_ + at) = 1;
    }
  }
  // Bytes that a disk, or a host below it, cannot store in less space.
  void FillRandom() const {
    uint64_t state = 0x9e3779b97f4a7c15;
    for (size_t at = 0; at < bytes_; at += sizeof(state)) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      std::memcpy(data_ + at, &state, sizeof(state));
    }
  }

 private:
  size_t bytes_;
  char* data_;
};

// An open file, closed at the end of its scope.
class File {
 public:
  File(const std::string& path, int flags) : path_(path) {
    fd_ = open(path.c_str(), flags | O_CLOEXEC, 0644);
    if (fd_ < 0) Fail("open " + path);
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  size_t Size() const {
    struct stat info;
    if (fstat(fd_, &info) != 0) Fail("fstat " + path_);
    return static_cast<size_t>(info.st_size);
  }
  void Write(const char* data, size_t bytes, size_t at) const {
    while (bytes > 0) {
      const ssize_t done = pwrite(fd_, data, bytes, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) Fail("pwrite " + path_);
      data += done;
      bytes -= static_cast<size_t>(done);
      at += static_cast<size_t>(done);
    }
  }
  // One read; returns the bytes that came.
  size_t Read(char* data, size_t bytes, size_t at) const {
    while (true) {
      const ssize_t done = pread(fd_, data, bytes, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) Fail("pread " + path_);
      return static_cast<size_t>(done);
    }
  }
  void Sync() const {
    if (fdatasync(fd_) != 0) Fail("fdatasync " + path_);
  }
  void DropFromMemory() const {
    Sync();
    const int error = posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
    if (error != 0) {
      errno = error;
      Fail("posix_fadvise " + path_);
    }
  }

 private:
  std::string path_;
  int fd_;
};

double CpuSeconds() {
  struct rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) Fail("getrusage");
  const auto seconds = [](const struct timeval& time) {
    return static_cast<double>(time.tv_sec) +
           static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Runs `work`, which moves `bytes`, and prints the line of JSON.
void Time(size_t bytes, const std::function<void()>& work) {
  const double cpu = CpuSeconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> taken =
      std::chrono::steady_clock::now() - start;
  std::printf("{\"seconds\": %.9f, \"cpu_seconds\": %.6f, \"bytes\": %zu}\n",
              taken.count(), CpuSeconds() - cpu, bytes);
}

void RunThreads(size_t count, const std::function<void(size_t)>& work) {
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&work, &errors, i] {
      try {
        work(i);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

void MeasureMemcpy(size_t bytes, size_t threads) {
  const size_t share = RoundUp(bytes / threads, kPage);
  const Memory from(share * threads, true);
  const Memory to(share * threads, true);
  from.Touch();
  to.Touch();
  Time(share * threads, [&] {
    RunThreads(threads, [&](size_t i) {
      std::memcpy(to.data() + i * share, from.data() + i * share, share);
    });
  });
}

void MeasureGather(size_t bytes, size_t run) {
  constexpr size_t kStride = 8;  // as one of 8 column shards
  const size_t rows = std::max<size_t>(bytes / run, kStride) / kStride;
  const Memory from(rows * kStride * run, true);
  const Memory to(rows * kStride * run, true);
  from.Touch();
  to.Touch();
  Time(rows * kStride * run, [&] {
    char* next = to.data();
    for (size_t column = 0; column < kStride; ++column) {
      const char* row = from.data() + column * run;
      for (size_t i = 0; i < rows; ++i, row += kStride * run, next += run) {
        std::memcpy(next, row, run);
      }
    }
  });
}

void MeasureFirstTouch(size_t bytes, bool huge) {
  const Memory memory(bytes, huge);
  Time(RoundUp(bytes, size_t{2} << 20), [&] { memory.Touch(); });
}

// `source` holds kSourcePieces pieces, written in turn.
void WriteAll(const File& file, const Memory& source, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kPiece) {
    file.Write(source.data() + at % (kPiece * kSourcePieces),
               std::min(kPiece, bytes - at), at);
  }
  file.Sync();
}

void MeasureWrite(const std::string& path, size_t bytes,
                  const std::string& mode) {
  if (mode != "direct" && mode != "recycled" && mode != "buffered") {
    throw std::runtime_error("write knows no mode " + mode);
  }
  bytes = RoundUp(bytes, kPage);
  const Memory source(kPiece * kSourcePieces, true);
  source.FillRandom();
  const int direct = mode == "buffered" ? 0 : O_DIRECT;
  if (mode == "recycled") {
    WriteAll(File(path, O_CREAT | O_TRUNC | O_WRONLY | direct), source, bytes);
  }
  const int fresh = mode == "recycled" ? 0 : O_CREAT | O_EXCL;
  Time(bytes,
       [&] { WriteAll(File(path, fresh | O_WRONLY | direct), source, bytes); });
}

void MeasureReadCold(const std::vector<std::string>& paths) {
  size_t total = 0, room = 0;
  for (const std::string& path : paths) {
    const File file(path, O_RDONLY);
    file.DropFromMemory();
    total += file.Size();
    room += RoundUp(file.Size(), kPage);
  }
  // Room for all of it: a piece that is read over and over stays in the CPU's
  // caches, and a virtual disk, whose host copies, then seems faster than it
  // can fill memory.
  const Memory target(room, true);
  target.Touch();
  Time(total, [&] {
    char* next = target.data();
    for (const std::string& path : paths) {
      const File file(path, O_RDONLY | O_DIRECT);
      const size_t size = file.Size();
      for (size_t at = 0; at < size;) {
        const size_t left = RoundUp(size - at, kPage);
        at += file.Read(next + at, std::min(kPiece, left), at);
      }
      next += RoundUp(size, kPage);
    }
  });
}

void MeasureReadWarm(size_t threads, const std::vector<std::string>& paths) {
  struct Piece {
    const File* file;
    size_t at, bytes, to;
  };
  std::vector<std::unique_ptr<File>> files;
  std::vector<Piece> pieces;
  size_t total = 0;
  for (const std::string& path : paths) {
    files.push_back(std::make_unique<File>(path, O_RDONLY));
    const size_t size = files.back()->Size();
    for (size_t at = 0; at < size; at += kPiece) {
      const size_t bytes = std::min(kPiece, size - at);
      pieces.push_back({files.back().get(), at, bytes, total});
      total += bytes;
    }
  }
  const Memory target(total, true);
  target.Touch();
  const auto read_share = [&](size_t thread) {
    for (size_t i = thread; i < pieces.size(); i += threads) {
      const Piece& piece = pieces[i];
      for (size_t done = 0; done < piece.bytes;) {
        done += piece.file->Read(target.data() + piece.to + done,
                                 piece.bytes - done, piece.at + done);
      }
    }
  };
  for (size_t i = 0; i < threads; ++i) read_share(i);  // into the page cache
  Time(total, [&] { RunThreads(threads, read_share); });
}

// Anonymous and shared memory of a process, without mapped files, in bytes.
size_t UsedMemory(const std::string& status_path) {
  std::ifstream status(status_path);
  if (!status) Fail("open " + status_path);
  size_t kibibytes = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) kibibytes += std::stoul(line.substr(8));
    if (line.rfind("RssShmem:", 0) == 0)
      kibibytes += std::stoul(line.substr(9));
  }
  return kibibytes << 10;
}

// Whether a process was forked and runs no program of its own: until it does it
// shares its parent's memory, all of which would count twice. No contender
// keeps such a process.
bool IsFork(const std::string& pid) {
  constexpr unsigned long kForkedNoExec = 0x40;  // PF_FORKNOEXEC of sched.h
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // a name may have blanks
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int i = 0; i < 6; ++i) fields >> skipped;
  unsigned long flags = 0;
  fields >> flags;
  return (flags & kForkedNoExec) != 0;
}

// Adds the processes that `pid` has started, and those that these have, without
// this one. What ends meanwhile is left out.
void AddDescendants(const std::string& pid, std::vector<std::string>& found) {
  const std::string self = std::to_string(getpid());
  std::error_code ended;
  // A child belongs to the thread that started it.
  for (std::filesystem::directory_iterator task("/proc/" + pid + "/task",
                                                ended);
       !ended && task != std::filesystem::directory_iterator();
       task.increment(ended)) {
    std::ifstream children(task->path() / "children");
    for (std::string child; children >> child;) {
      if (child == self || IsFork(child)) continue;
      found.push_back(child);
      AddDescendants(child, found);
    }
  }
}

// Kibibytes of the lines of `path` that begin with `name`, in bytes; 0 if the
// file is gone.
size_t Field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) == 0) {
      return std::stoul(line.substr(name.size())) << 10;
    }
  }
  return 0;
}

// Anonymous memory of process `pid` and its descendants, and the shared memory
// of the machine: a segment may be mapped by several of them, or by none.
size_t UsedMemoryOfTree(const std::string& pid) {
  std::vector<std::string> processes = {pid};
  AddDescendants(pid, processes);
  size_t used = Field("/proc/meminfo", "Shmem:");
  for (const std::string& process : processes) {
    used += Field("/proc/" + process + "/status", "RssAnon:");
  }
  return used;
}

// Follows the memory of process `pid` from outside, since a thread inside it
// would wait for the interpreter lock that a rival holds while it copies.
// "b\n" on stdin begins a watch and is answered with the bytes in use;
// "e\n" ends it and is answered with the largest use seen, every 5 ms, since
// then. The end of stdin ends the program. `used` looks.
void Watch(const std::function<size_t()>& used) {
  size_t peak = 0;
  bool watching = false;
  struct pollfd input = {STDIN_FILENO, POLLIN, 0};
  while (true) {
    const int ready = poll(&input, 1, watching ? 5 : -1);
    if (ready < 0 && errno != EINTR) Fail("poll");
    if (watching) peak = std::max(peak, used());
    if (ready <= 0) continue;
    char command[2];
    if (read(STDIN_FILENO, command, sizeof(command)) <= 0) return;
    watching = command[0] == 'b';
    if (watching) peak = used();
    std::printf("%zu\n", peak);
    std::fflush(stdout);
  }
}

void Run(const std::vector<std::string>& words) {
  const auto number = [&](size_t i) { return std::stoul(words.at(i)); };
  const auto rest = [&](size_t i) {
    words.at(i);
    return std::vector<std::string>(words.begin() + static_cast<long>(i),
                                    words.end());
  };
  const std::string& command = words.at(0);
  if (command == "memcpy") return MeasureMemcpy(number(1), number(2));
  if (command == "gather") return MeasureGather(number(1), number(2));
  if (command == "first_touch") {
    return MeasureFirstTouch(number(1), number(2) != 0);
  }
  if (command == "write") {
    return MeasureWrite(words.at(1), number(2), words.at(3));
  }
  if (command == "read_cold") return MeasureReadCold(rest(1));
  if (command == "read_warm") return MeasureReadWarm(number(1), rest(2));
  if (command == "touch") return Memory(number(1), true).Touch();
  if (command == "watch") {
    const std::string path = "/proc/" + words.at(1) + "/status";
    return Watch([&] { return UsedMemory(path); });
  }
  if (command == "watch_tree") {
    return Watch([&] { return UsedMemoryOfTree(words.at(1)); });
  }
  throw std::runtime_error("unknown command " + command);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(std::vector<std::string>(argv + 1, argv + argc));
    return 0;
  } catch (const std::out_of_range&) {
    std::fprintf(stderr, "limits: too few arguments\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "limits: %s\n", error.what());
  }
  return 1;
}
