#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "os/byte_sink.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kAlign = uint64_t{64} << 10;

// Known bytes in memory that suits direct I/O.
class Memory {
 public:
  explicit Memory(uint64_t size) : memory_(size + kAlign), size_(size) {
    void* at = memory_.data();
    size_t room = memory_.size();
    data_ = static_cast<std::byte*>(std::align(kAlign, size_, at, room));
    for (uint64_t i = 0; i < size_; ++i) {
      data_[i] = static_cast<std::byte>((i * 31 + i / 4096) % 251);
    }
  }
  ByteSpan part(uint64_t begin, uint64_t end) const {
    return ByteSpan(data_, size_).subspan(begin, end - begin);
  }
  std::string text() const { return std::string(AsText({data_, size_})); }

 private:
  std::vector<std::byte> memory_;
  std::byte* data_ = nullptr;
  uint64_t size_;
};

class ByteSinkTest : public TemporaryDirectory {
 protected:
  // Writes all in stretches that are cut at `cuts`, from the last to the first.
  Status WriteAt(const Memory& memory, uint64_t size,
                 const std::vector<uint64_t>& cuts, bool direct_io = true) {
    TC_RETURN_IF_ERROR(dir().Unlink("f", /*missing_ok=*/true));
    TC_RETURN_IF_ERROR(ByteSink::Create(dir(), "f", size));
    TC_ASSIGN_OR_RETURN(const auto sink,
                        ByteSink::Open(dir(), "f", size, direct_io));
    uint64_t end = size;
    for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) {
      TC_RETURN_IF_ERROR(sink->Write(memory.part(*cut, end), *cut));
      end = *cut;
    }
    TC_RETURN_IF_ERROR(sink->Write(memory.part(0, end), 0));
    return sink->Close(/*sync=*/true);
  }
  std::string Content() { return dir().ReadFile("f", 1 << 30).value(); }
};

TEST_F(ByteSinkTest, WritesWhatItIsGiven) {
  for (const uint64_t size :
       {uint64_t{1}, kMiB, 3 * kMiB + 5, 2 * kMiB + 4096}) {
    const Memory memory(size);
    for (const bool direct_io : {true, false}) {
      for (const std::vector<uint64_t>& cuts :
           std::vector<std::vector<uint64_t>>{{}, {size / 8192 * 4096}}) {
        const Status status = WriteAt(memory, size, cuts, direct_io);
        ASSERT_TRUE(status.ok()) << status.ToString();
        EXPECT_TRUE(Content() == memory.text()) << size;
      }
    }
  }
}

TEST_F(ByteSinkTest, CreateNeverTakesANameThatIsThere) {
  ASSERT_TRUE(ByteSink::Create(dir(), "f", 10).ok());
  EXPECT_EQ(ByteSink::Create(dir(), "f", 10).sys_errno(), EEXIST);
  EXPECT_EQ(dir().StatName("f")->value().bytes, 10u);
}

#ifdef TORCH_CKPT_FAULTS

TEST_F(ByteSinkTest, AFileIsNeverLongerThanItIsToBe) {
  const uint64_t size = 2 * kMiB + 5;
  const Memory memory(size);
  uint64_t most = 0;
  int direct = 0, cuts = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.transfer && site.transfer->direct) {
      ++direct;
      most = std::max(most, site.transfer->offset + site.transfer->bytes);
    }
    cuts += site.op == std::string("ftruncate") ? 1 : 0;
    return {};
  });
  const Status status = WriteAt(memory, size, {kMiB});
  SetFaultHook(nullptr);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(direct, 2);
  EXPECT_LE(most, size);
  EXPECT_EQ(cuts, 0);
  EXPECT_TRUE(Content() == memory.text());
}

TEST_F(ByteSinkTest, ARefusalIsForGoodAndLosesNothing) {
  const uint64_t size = 6 * kMiB + 5;
  const Memory memory(size);
  for (const auto& [refused, error] :
       {std::pair{1, EINVAL}, std::pair{2, EOPNOTSUPP}, std::pair{3, ENOSYS}}) {
    int direct = 0;
    SetFaultHook(
        [&, most = refused, as = error](const FaultSite& site) -> FaultAction {
          const bool is = site.transfer && site.transfer->direct;
          return {.sys_errno = is && ++direct >= most ? as : 0};
        });
    const Status status =
        WriteAt(memory, size, {kMiB, 2 * kMiB, 3 * kMiB, 5 * kMiB});
    SetFaultHook(nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(direct, refused);
    EXPECT_TRUE(Content() == memory.text());
  }
}

TEST_F(ByteSinkTest, AlignmentsAreKept) {
  const uint64_t size = 4 * kMiB + 5;
  const Memory memory(size);
  for (const uint32_t unit : {512u, 16384u, 65536u, 131072u}) {
    int direct = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (site.op == std::string("statx")) return {.alignment = unit};
      if (!site.transfer || !site.transfer->direct) return {};
      ++direct;
      const FaultTransfer& t = *site.transfer;
      EXPECT_EQ(t.offset % unit, 0u);
      EXPECT_EQ(t.bytes % unit, 0u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(t.memory) % unit, 0u);
      return {};
    });
    // Cut as files are divided among writers, but for the end.
    const Status status =
        WriteAt(memory, size, {kMiB, kMiB + 4096, 2 * kMiB, 4 * kMiB});
    SetFaultHook(nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(direct > 0, unit <= 65536) << unit;
    EXPECT_TRUE(Content() == memory.text()) << unit;
  }
}

TEST_F(ByteSinkTest, WhatCannotBeSetUpIsWrittenThroughTheCache) {
  const uint64_t size = 2 * kMiB + 5;
  const Memory memory(size);
  for (const std::string op : {"fcntl(O_DIRECT)", "statx"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EINVAL : 0};
    });
    const Status status = WriteAt(memory, size, {kMiB});
    SetFaultHook(nullptr);
    ASSERT_TRUE(status.ok()) << op << status.ToString();
    EXPECT_TRUE(Content() == memory.text()) << op;
  }
}

TEST_F(ByteSinkTest, ShortCountsAreContinued) {
  const uint64_t size = 3 * kMiB + 5;
  const Memory memory(size);
  for (const uint32_t unit : {0u, 65536u}) {
    int calls = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (site.op == std::string("statx")) return {.alignment = unit};
      if (site.transfer && ++calls % 3 == 0) return {.sys_errno = EINTR};
      return {.short_count = site.transfer && site.transfer->direct};
    });
    const Status status = WriteAt(memory, size, {kMiB});
    SetFaultHook(nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(Content() == memory.text()) << unit;
  }
}

TEST_F(ByteSinkTest, FailuresComeOut) {
  const uint64_t size = 2 * kMiB + 5;
  const Memory memory(size);
  for (const std::string op : {"openat", "fallocate", "fsync", "close"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EIO : 0};
    });
    const Status status = WriteAt(memory, size, {});
    SetFaultHook(nullptr);
    EXPECT_EQ(status.sys_errno(), EIO) << op;
  }
  for (const bool direct : {true, false}) {  // the whole units, then the end
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool hit = site.transfer && site.transfer->direct == direct;
      return {.sys_errno = hit ? ENOSPC : 0};
    });
    const Status status = WriteAt(memory, size, {});
    SetFaultHook(nullptr);
    EXPECT_EQ(status.sys_errno(), ENOSPC) << direct;
  }
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
