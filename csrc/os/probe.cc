#include "os/probe.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>

#include "base/bytes.h"
#include "os/call.h"

namespace torch_ckpt {
namespace {

using internal::SystemCall;

// struct statx as the kernel has it since 6.1. The C library's may be older
// and lack the two alignments, hence this copy and the raw call.
struct KernelStatx {
  uint32_t mask;
  std::array<uint32_t, 37> other;
  uint32_t direct_memory_alignment;
  uint32_t direct_offset_alignment;
  std::array<uint64_t, 12> spare;
};
static_assert(offsetof(KernelStatx, direct_memory_alignment) == 0x98);
static_assert(sizeof(KernelStatx) == 0x100);

constexpr unsigned kStatxDirectAlignment = 0x2000;  // STATX_DIOALIGN

struct Magic {
  uint64_t number;
  const char* name;
  bool local = false;  // only one node mounts it
};

// From statfs(2) and linux/magic.h, and for the cluster file systems from
// their own documentation. What an overlay lies on, nobody says: it may not be
// changed under the overlay, so what it shows is of this node.
constexpr Magic kMagics[] = {
    {0xef53, "ext4", true},
    {0x58465342, "xfs", true},
    {0x9123683e, "btrfs", true},
    {0x01021994, "tmpfs", true},
    {0x794c7630, "overlayfs", true},
    {0x2fc12fc1, "zfs", true},
    {0xf2f52010, "f2fs", true},
    {0x858458f6, "ramfs", true},
    {0xca451a4e, "bcachefs", true},
    {0x73717368, "squashfs", true},
    {0x4d44, "vfat", true},
    {0x2011bab0, "exfat", true},
    {0x6969, "nfs"},
    {0x0bd00bd0, "lustre"},
    {0x47504653, "gpfs"},
    {0x19830326, "beegfs"},
    {0x00c36400, "ceph"},
    {0x65735546, "fuse"},
    {0xff534d42, "cifs"},
    {0xfe534d42, "smb2"},
    {0x01021997, "9p"},
    {0x7461636f, "ocfs2"},
    {0x01161970, "gfs2"},
    {0xaad7aaea, "panfs"},
    {0x5346414f, "afs"},
};

Result<const Magic*> FindMagic(const Directory& directory, uint64_t* number) {
  struct statfs st;
  if (SystemCall("fstatfs", directory.path(),
                 [&] { return fstatfs(directory.fd(), &st); }) < 0) {
    return Status::Io(errno, "fstatfs", directory.path());
  }
  // f_type is signed on some platforms; the magic numbers have 32 bits.
  *number = static_cast<uint32_t>(st.f_type);
  for (const Magic& magic : kMagics) {
    if (magic.number == *number) return &magic;
  }
  return nullptr;
}

bool Lacks(int error) { return internal::LacksCall(error) || error == ESPIPE; }

Status TryWrites(const Directory& directory, const std::string& name,
                 const std::string& renamed) {
  constexpr std::byte kBytes[1] = {};
  TC_ASSIGN_OR_RETURN(
      File file, directory.OpenFile(name, {.write = true, .create_new = true}));
  TC_RETURN_IF_ERROR(file.WriteAll(kBytes, 4096));
  TC_RETURN_IF_ERROR(file.WriteAll(kBytes, 0));
  TC_RETURN_IF_ERROR(file.Close());
  return directory.Rename(name, directory, renamed);
}

}  // namespace

Status ProbeWrites(const Directory& directory) {
  const std::string name = "probe", renamed = "probe.renamed";
  Status tried = TryWrites(directory, name, renamed);
  for (const std::string& made : {name, renamed}) {
    const Status gone = directory.Unlink(made, /*missing_ok=*/true);
    if (tried.ok()) tried = gone;
  }
  if (!Lacks(tried.sys_errno())) return tried;
  const Result<std::string> kind = FileSystemName(directory);
  return Unsupported("the file system (" + (kind.ok() ? *kind : "unknown") +
                     ") cannot write out of order and rename, as a save has "
                     "to: " +
                     tried.message())
      .WithFile(directory.path());
}

Result<DirectIo> ProbeDirectIo(const File& file) {
  static const auto kPage = static_cast<uint32_t>(sysconf(_SC_PAGESIZE));
  DirectIo direct;
  KernelStatx st{};
  const FaultAction fault = FaultPoint("statx", file.path());
  const long result = fault.sys_errno != 0
                          ? (errno = fault.sys_errno, -1)
                          : syscall(SYS_statx, file.fd(), "",
                                    AT_EMPTY_PATH | AT_STATX_DONT_SYNC,
                                    kStatxDirectAlignment, &st);
  if (result < 0 && !internal::UnknownCall(errno)) {
    return Status::Io(errno, "statx", file.path());
  }
  if (result < 0 || (st.mask & kStatxDirectAlignment) == 0) {
    direct.memory_alignment = direct.offset_alignment = std::max(4096u, kPage);
  } else {
    direct.memory_alignment = st.direct_memory_alignment;
    direct.offset_alignment = st.direct_offset_alignment;
  }
  if (fault.alignment != 0) {
    direct.memory_alignment = direct.offset_alignment = fault.alignment;
  }
  direct.supported = std::has_single_bit(direct.memory_alignment) &&
                     std::has_single_bit(direct.offset_alignment);
  return direct;
}

uint64_t FreeDescriptors() {
  constexpr uint64_t kGuess = 256;
  rlimit limit{};
  if (SystemCall("getrlimit", {},
                 [&] { return getrlimit(RLIMIT_NOFILE, &limit); }) < 0) {
    return kGuess;
  }
  const auto open = Directory::Open("/proc/self/fd");
  const auto names = open.ok() ? open->List() : open.status();
  if (!names.ok()) return std::min<uint64_t>(kGuess, limit.rlim_cur);
  const uint64_t used = names->size();
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

Result<std::string> FileSystemName(const Directory& directory) {
  uint64_t number = 0;
  TC_ASSIGN_OR_RETURN(const Magic* const magic, FindMagic(directory, &number));
  if (magic) return std::string(magic->name);
  std::string text = "0x";
  AppendHex(&text, number, 8);
  return text;
}

bool IsShared(const Directory& directory) {
  uint64_t number = 0;
  const auto magic = FindMagic(directory, &number);
  return !magic.ok() || !*magic || !(*magic)->local;
}

}  // namespace torch_ckpt
