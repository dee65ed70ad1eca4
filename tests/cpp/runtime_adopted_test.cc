#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/adopted.h"
#include "runtime/arena.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Bytes of memory files that this process has mapped, by /proc/self/maps.
size_t MappedPieces() {
  std::ifstream maps("/proc/self/maps");
  size_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    size_t begin = 0, end = 0;
    if (line.find("memfd:torch_ckpt") != std::string::npos &&
        std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) == 2) {
      bytes += end - begin;
    }
  }
  return bytes;
}

class AdoptedTest : public testing::Test {
 protected:
  ArenaLease Lease(size_t bytes) {
    auto lease = theirs_.Lease(bytes, {.kind = MemoryKind::kShared});
    EXPECT_TRUE(lease.ok()) << lease.status().ToString();
    return std::move(lease).value();
  }
  std::shared_ptr<std::byte> Adopt(const ArenaLease& lease) {
    const SharedPlace place = *lease.shared();
    auto adopted = ours_.Adopt(place.fd, place.offset, lease.size());
    EXPECT_TRUE(adopted.ok()) << adopted.status().ToString();
    return std::move(adopted).value();
  }

  Arena theirs_{64 * kMiB};
  AdoptedMemory ours_;
};

TEST_F(AdoptedTest, IsTheSameMemory) {
  const ArenaLease lease = Lease(4 * kMiB);
  const int fd = dup(lease.shared()->fd);
  auto adopted = ours_.Adopt(fd, lease.shared()->offset, lease.size());
  ASSERT_TRUE(adopted.ok()) << adopted.status().ToString();
  close(fd);
  std::byte* const data = adopted->get();
  EXPECT_TRUE(ours_.Holds({data, lease.size()}));
  EXPECT_FALSE(ours_.Holds({data + 1, lease.size()}));
  EXPECT_FALSE(ours_.Holds(lease.span()));
  lease.data()[5] = std::byte{9};
  EXPECT_EQ(data[5], std::byte{9});
  data[6] = std::byte{8};
  EXPECT_EQ(lease.data()[6], std::byte{8});
  adopted->reset();
  EXPECT_FALSE(ours_.Holds({data, 1}));
  EXPECT_FALSE(ours_.Adopt(fd, 0, kMiB).ok());  // closed
}

TEST_F(AdoptedTest, StaysMappedForTheNextOne) {
  const ArenaLease sent = Lease(4 * kMiB);
  std::byte* first = nullptr;
  {
    const auto adopted = Adopt(sent);
    first = adopted.get();
    const auto twice = Adopt(sent);
    EXPECT_EQ(twice.get(), first);
    EXPECT_TRUE(ours_.Holds({first, sent.size()}));
  }
  EXPECT_FALSE(ours_.Holds({first, 1}));
  const size_t before = MappedPieces();
  for (int i = 0; i < 8; ++i) {
    auto a = Adopt(sent), b = Adopt(sent);
    EXPECT_EQ(a.get(), first);
    a.reset();
    EXPECT_TRUE(ours_.Holds({b.get(), sent.size()}));
    ours_.Trim();  // nothing that is in use
    EXPECT_EQ(b.get()[5], sent.data()[5]);
    EXPECT_EQ(MappedPieces(), before);
  }
  // Of others only some stay.
  std::vector<ArenaLease> others;
  for (size_t i = 1; i <= 10; ++i) {
    others.push_back(Lease(2 * kMiB));
    const auto adopted = Adopt(others.back());
    adopted.get()[0] = std::byte{9};
    EXPECT_EQ(others.back().data()[0], std::byte{9});
  }
  const auto last = Adopt(others.back());
  // Of the sender's ten pieces, four that nobody holds and the one in use.
  EXPECT_EQ(MappedPieces(), before - 4 * kMiB + (10 + 5) * 2 * kMiB);
  ours_.Trim();
  EXPECT_EQ(last.get()[0], std::byte{9});
  EXPECT_EQ(MappedPieces(), before - 4 * kMiB + 11 * 2 * kMiB);
}

TEST_F(AdoptedTest, AForkedChildHasNone) {
  const ArenaLease lease = Lease(2 * kMiB);
  auto adopted = Adopt(lease);
  const pid_t child = fork();
  if (child == 0) {
    const SharedPlace place = *lease.shared();
    const auto refused = ours_.Adopt(place.fd, place.offset, lease.size());
    adopted.reset();  // unmaps nothing
    ours_.Trim();
    _exit(refused.status().kind() == ErrorKind::kUnsupported ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  adopted.get()[0] = std::byte{1};
}

}  // namespace
}  // namespace torch_ckpt
