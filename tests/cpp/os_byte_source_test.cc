#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "os/byte_source.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::string Bytes(size_t size, unsigned seed = 0) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) {
    text[i] = static_cast<char>((i * 31 + i / 4096 + seed) % 251);
  }
  return text;
}

// Memory as Read wants it.
class Scratch {
 public:
  explicit Scratch(uint64_t bytes)
      : memory_(bytes + 2 * ByteSource::kSlack),
        size_(bytes + ByteSource::kSlack) {}
  MutableByteSpan span() {
    void* at = memory_.data();
    size_t room = memory_.size();
    std::align(ByteSource::kSlack / 2, size_, at, room);
    return {static_cast<std::byte*>(at), size_};
  }

 private:
  std::vector<std::byte> memory_;
  size_t size_;
};

class ByteSourceTest : public TemporaryDirectory {
 protected:
  ByteSource Open(const std::string& name, bool direct_io = true) {
    auto file = dir().OpenFile(name, {});
    EXPECT_TRUE(file.ok()) << file.status().ToString();
    const uint64_t size = file->Stat()->bytes;
    return ByteSource(std::move(file).value(), size, direct_io);
  }
  static std::string Read(const ByteSource& source, uint64_t lo, uint64_t hi,
                          Readers readers = Readers::kThisProcess) {
    Scratch scratch(hi - lo);
    const auto bytes = source.Read(lo, hi, scratch.span(), readers);
    if (!bytes.ok()) return bytes.status().ToString();
    return std::string(reinterpret_cast<const char*>(*bytes), hi - lo);
  }
};

TEST_F(ByteSourceTest, ReadsAnyRange) {
  const std::string text = Bytes(3 * kMiB + 1234);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (const bool direct_io : {true, false}) {
    const ByteSource source = Open("f", direct_io);
    EXPECT_EQ(source.size(), text.size());
    for (const uint64_t lo : {uint64_t{0}, uint64_t{1}, uint64_t{4097}, kMiB}) {
      for (const uint64_t hi : {lo + 1, 2 * kMiB + 77, text.size()}) {
        for (const Readers readers :
             {Readers::kThisProcess, Readers::kSeveral}) {
          EXPECT_TRUE(Read(source, lo, hi, readers) == text.substr(lo, hi - lo))
              << lo << " " << hi;
        }
      }
    }
  }
}

TEST_F(ByteSourceTest, StepsAreTheBytesOfTheRange) {
  const std::string text = Bytes(3 * kMiB + 1234);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  const uint64_t lo = 4099, size = 200'000;
  for (const bool dropped : {false, true}) {
    for (const Readers readers : {Readers::kThisProcess, Readers::kSeveral}) {
      const ByteSource source = Open("f");
      if (dropped) DropCache(source.path());
      Scratch scratch(text.size());
      StepReader steps(source, text.size(), scratch.span(), readers);
      for (uint64_t at = lo; at < text.size(); at += size) {
        const uint64_t step = std::min<uint64_t>(size, text.size() - at);
        auto bytes = steps.Next(at, step);
        if (bytes.ok() && !*bytes) {
          ASSERT_TRUE(steps.FetchRest(at).ok());
          bytes = steps.Next(at, step);
        }
        ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
        ASSERT_TRUE(*bytes);
        EXPECT_TRUE(std::string_view(reinterpret_cast<const char*>(*bytes),
                                     step) == text.substr(at, step))
            << at;
      }
    }
  }
}

TEST_F(ByteSourceTest, AnEarlyEndSaysWhere) {
  ASSERT_TRUE(dir().WriteFile("f", Bytes(kMiB)).ok());
  const ByteSource source = Open("f");
  Scratch scratch(2 * kMiB);
  for (const Readers readers : {Readers::kThisProcess, Readers::kSeveral}) {
    const Status status =
        source.Read(4096, 2 * kMiB, scratch.span(), readers).status();
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
    EXPECT_NE(status.message().find("file ends at byte 1048576"),
              std::string::npos)
        << status.ToString();
  }
}

TEST_F(ByteSourceTest, ARangeFitsInABufferOfItsUnitsAndInNoSmallerOne) {
  const std::string text = Bytes(2 * kMiB);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  const ByteSource source = Open("f");
  Scratch scratch(2 * kMiB);
  for (const uint64_t lo : {uint64_t{0}, uint64_t{5000}, kMiB - 1}) {
    for (const uint64_t hi : {kMiB, kMiB + 1, 2 * kMiB}) {
      if (hi - lo < 2) continue;
      constexpr uint64_t kUnit = ByteSource::kSlack / 2;
      const uint64_t units =
          (hi + kUnit - 1) / kUnit * kUnit - lo / kUnit * kUnit;
      const auto bytes = source.Read(lo, hi, scratch.span().first(units));
      ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
      EXPECT_EQ(std::memcmp(*bytes, text.data() + lo, hi - lo), 0);
      EXPECT_EQ(
          source.Read(lo, hi, scratch.span().first(units - 1)).status().kind(),
          ErrorKind::kInternal);
    }
  }
}

#ifdef TORCH_CKPT_FAULTS

struct Seen {
  int opens = 0, direct = 0, cached = 0;
};

// Nothing is in the cache; direct transfers go by `refuse`.
template <class Refuse>
void Watch(Seen* seen, const Refuse& refuse, uint32_t alignment = 0) {
  SetFaultHook([=](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    if (op == "preadv2") return {.sys_errno = EAGAIN};
    if (op == "cachestat") return {.sys_errno = ENOSYS};
    if (op == "openat") ++seen->opens;
    if (op == "statx") return {.alignment = alignment};
    if (!site.transfer) return {};
    ++(site.transfer->direct ? seen->direct : seen->cached);
    return {.sys_errno =
                site.transfer->direct && refuse(*site.transfer) ? EINVAL : 0};
  });
}

const auto kTaken = [](const FaultTransfer&) { return false; };

TEST_F(ByteSourceTest, LargeRangesThatAreNotCachedGoPastTheCache) {
  const std::string text = Bytes(2 * kMiB + 5);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  Seen seen;
  const ByteSource source = Open("f");
  Watch(&seen, kTaken);
  EXPECT_TRUE(Read(source, 5, text.size()) == text.substr(5));
  EXPECT_EQ(seen.direct, 1);
  EXPECT_EQ(seen.cached, 0);
  EXPECT_EQ(seen.opens, 0) << "one descriptor is enough";
  // What others want, and what is small, does not.
  EXPECT_TRUE(Read(source, 0, kMiB, Readers::kSeveral) == text.substr(0, kMiB));
  EXPECT_TRUE(Read(source, 7, 100) == text.substr(7, 93));
  EXPECT_EQ(seen.direct, 1);
  EXPECT_EQ(seen.cached, 2);
  EXPECT_EQ(seen.opens, 1) << "one more for both";
  const ByteSource never = Open("f", /*direct_io=*/false);
  EXPECT_TRUE(Read(never, 5, text.size()) == text.substr(5));
  EXPECT_EQ(seen.direct, 1);
}

TEST_F(ByteSourceTest, ARefusalIsForGoodAndLosesNothing) {
  const std::string text = Bytes(6 * kMiB + 5);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (const int refused : {1, 2, 3}) {
    Seen seen;
    const ByteSource source = Open("f");
    Watch(&seen, [&](const FaultTransfer&) { return seen.direct == refused; });
    for (const uint64_t lo : {uint64_t{0}, 2 * kMiB, 4 * kMiB, 3 * kMiB}) {
      const uint64_t hi = std::min(lo + 2 * kMiB, text.size());
      EXPECT_TRUE(Read(source, lo, hi) == text.substr(lo, hi - lo)) << lo;
    }
    EXPECT_EQ(seen.direct, refused) << "not tried again";
    SetFaultHook(nullptr);
  }
}

// The flag, the question for the alignment, the second descriptor.
TEST_F(ByteSourceTest, WhatCannotBeSetUpIsReadThroughTheCache) {
  const std::string text = Bytes(2 * kMiB);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (const std::string op : {"fcntl(O_DIRECT)", "statx", "openat"}) {
    for (const bool cached_first : {false, true}) {
      const ByteSource source = Open("f");
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        if (site.op == op) return {.sys_errno = EINVAL};
        const std::string is = site.op;
        if (is == "cachestat") return {.sys_errno = ENOSYS};
        return {.sys_errno = is == "preadv2" && !cached_first ? EAGAIN : 0};
      });
      const std::string all = Read(source, 0, text.size());
      const std::string small = Read(source, 10, 20);
      SetFaultHook(nullptr);
      EXPECT_TRUE(all == text) << op;
      EXPECT_EQ(small, text.substr(10, 10)) << op;
    }
  }
}

TEST_F(ByteSourceTest, AlignmentsAreKept) {
  const std::string text = Bytes(3 * kMiB + 5);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (const uint32_t unit : {512u, 16384u, 65536u, 131072u, 3000u}) {
    Seen seen;
    const ByteSource source = Open("f");
    const bool usable = unit == 512 || unit == 16384 || unit == 65536;
    Watch(
        &seen,
        [&](const FaultTransfer& t) {
          EXPECT_EQ(t.offset % unit, 0u);
          EXPECT_EQ(t.bytes % unit, 0u);
          EXPECT_EQ(reinterpret_cast<uintptr_t>(t.memory) % unit, 0u);
          return false;
        },
        unit);
    for (const uint64_t lo : {uint64_t{0}, kMiB + 4096, kMiB + 7}) {
      EXPECT_TRUE(Read(source, lo, text.size()) == text.substr(lo)) << unit;
      EXPECT_TRUE(Read(source, lo, lo + kMiB) == text.substr(lo, kMiB));
    }
    EXPECT_EQ(seen.direct, usable ? 6 : 0) << unit;
    SetFaultHook(nullptr);
  }
}

TEST_F(ByteSourceTest, ShortCountsAreContinued) {
  const std::string text = Bytes(3 * kMiB + 5);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (const uint32_t unit : {0u, 65536u}) {
    int calls = 0;
    const ByteSource source = Open("f");
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "statx") return {.alignment = unit};
      if (op == "preadv2") return {.sys_errno = EAGAIN};
      if (op == "cachestat") return {.sys_errno = ENOSYS};
      if (site.transfer && ++calls % 3 == 0) return {.sys_errno = EINTR};
      return {.short_count = site.transfer && site.transfer->direct};
    });
    const std::string all = Read(source, 4097, text.size());
    SetFaultHook(nullptr);
    EXPECT_TRUE(all == text.substr(4097)) << unit;
    EXPECT_GT(calls, 3);
  }
}

// The second descriptor is of the file that was opened, whatever its name has
// come to mean.
TEST_F(ByteSourceTest, AnotherFileUnderTheNameIsNeverRead) {
  const std::string old = Bytes(2 * kMiB), fresh = Bytes(2 * kMiB, 9);
  ASSERT_TRUE(dir().WriteFile("f", old).ok());
  ASSERT_TRUE(dir().WriteFile("g", fresh).ok());
  Seen seen;
  const ByteSource source = Open("f");
  Watch(&seen, kTaken);
  EXPECT_EQ(Read(source, 0, 100), old.substr(0, 100));
  EXPECT_TRUE(Read(source, 0, kMiB) == old.substr(0, kMiB));
  ASSERT_TRUE(dir().Rename("g", dir(), "f").ok());
  EXPECT_TRUE(Read(source, 7, 100) == old.substr(7, 93));
  EXPECT_TRUE(Read(source, kMiB, 2 * kMiB) == old.substr(kMiB));
  EXPECT_GT(seen.direct, 1);
  EXPECT_GT(seen.opens, 0) << "both ways were used";
}

TEST_F(ByteSourceTest, ReadErrorsAreNoRefusals) {
  ASSERT_TRUE(dir().WriteFile("f", Bytes(2 * kMiB)).ok());
  const ByteSource source = Open("f");
  Seen seen;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    if (op == "preadv2") return {.sys_errno = EAGAIN};
    if (op == "cachestat") return {.sys_errno = ENOSYS};
    if (site.transfer) ++seen.direct;
    return {.sys_errno = site.transfer ? EIO : 0};
  });
  Scratch scratch(2 * kMiB);
  const Status status = source.Read(0, 2 * kMiB, scratch.span()).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.sys_errno(), EIO);
  EXPECT_NE(status.message().find("pread of"), std::string::npos);
  EXPECT_EQ(seen.direct, 1);
}

// Threads that read both ways while direct I/O is refused in between.
TEST_F(ByteSourceTest, ManyThreadsMayReadWhileItIsRefused) {
  const std::string text = Bytes(4 * kMiB + 5);
  ASSERT_TRUE(dir().WriteFile("f", text).ok());
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> direct = 0;
    const ByteSource source = Open("f");
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "cachestat") return {.sys_errno = ENOSYS};
      if (op == "preadv2") return {.sys_errno = EAGAIN};
      const bool is = site.transfer && site.transfer->direct;
      return {.sys_errno = is && ++direct > round ? EINVAL : 0};
    });
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (uint64_t i = 0; i < 8; ++i) {
          const uint64_t lo = (i * 7 + t * 13) % 32 * (kMiB / 16) + t;
          const uint64_t size = i % 2 == 0 ? kMiB : 1000;
          EXPECT_TRUE(Read(source, lo, lo + size) == text.substr(lo, size));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    SetFaultHook(nullptr);
  }
}

#endif  // TORCH_CKPT_FAULTS

TEST_F(ByteSourceTest, DescriptorsAreCounted) {
  ASSERT_TRUE(dir().WriteFile("f", "x").ok());
  const uint64_t before = ByteSource::OpenDescriptors();
  {
    const ByteSource source = Open("f");
    EXPECT_EQ(ByteSource::OpenDescriptors(), before + 1);
  }
  EXPECT_EQ(ByteSource::OpenDescriptors(), before);
}

}  // namespace
}  // namespace torch_ckpt
