// Whole jobs on file systems that refuse direct I/O, now or later, or that want
// larger units than 4096 bytes, with or without saying so.
#include "engine/read/verify_job.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

#ifdef TORCH_CKPT_FAULTS

class DirectIoTest : public EngineDiskTest {
 protected:
  // Rows and columns, odd sizes, several pieces and cells.
  void SetUp() override {
    EngineDiskTest::SetUp();
    tall_ = MakeArray(Dtype::kF32, {2999, 1001}, 1);  // 12 MB
    wide_ = MakeArray(Dtype::kF32, {700, 3000}, 2);   // 8 MB
    tiny_ = MakeArray(Dtype::kU8, {5, 3}, 3);
    pieces_ = GridPieces("tall", tall_, {3, 1});
    for (Piece& p : GridPieces("wide", wide_, {1, 3})) pieces_.push_back(p);
    pieces_.push_back(WholePiece("tiny", tiny_));
  }

  // `refuse` decides over direct transfers; `alignment` is what statx says, if
  // not 0. The cache is never of use.
  template <class Refuse>
  void On(const Refuse& refuse, uint32_t alignment = 0) {
    SetFaultHook(
        [this, refuse, alignment](const FaultSite& site) -> FaultAction {
          const std::string op = site.op;
          if (op == "preadv2") return {.sys_errno = EAGAIN};
          if (op == "cachestat") return {.sys_errno = ENOSYS};
          if (op == "statx") return {.alignment = alignment};
          if (!site.transfer || !site.transfer->direct) return {};
          const int nth = ++(op == "pread" ? reads_ : writes_);
          const bool refused = refuse(op, nth, *site.transfer);
          if (refused) ++refused_;
          return {.sys_errno = refused ? EINVAL : 0};
        });
  }

  // Saves, loads, verifies, merges on one process and on three, loads again.
  void ExpectAllGoesWell() {
    for (const char* name : {"c", "out", "out3"}) {
      std::filesystem::remove_all(Path(name));
    }
    ASSERT_OK(SaveAll(Path("c"), pieces_).status());
    ExpectContent("c");
    ASSERT_OK(Merge(Path("c"), Path("out")).status());
    ExpectContent("out");
    MergeSettings three;
    three.ranks = 3;
    ASSERT_OK(Merge(Path("c"), Path("out3"), three).status());
    ExpectContent("out3");
    SetFaultHook(nullptr);
    // What is on disk is right, not only what was read back.
    for (const char* name : {"c", "out", "out3"}) ExpectContent(name);
  }
  void ExpectContent(const std::string& name) {
    const auto all = ReadAll(Path(name));
    ASSERT_OK(all.status());
    EXPECT_TRUE(all->at("tall") == tall_.bytes);
    EXPECT_TRUE(all->at("wide") == wide_.bytes);
    EXPECT_TRUE(all->at("tiny") == tiny_.bytes);
    const auto checkpoint = OpenCheckpoint(Path(name));
    ASSERT_OK(checkpoint.status());
    Job job;
    EXPECT_OK(RunVerifyJob(*checkpoint, {}, &job).status());
  }

  Array tall_, wide_, tiny_;
  std::vector<Piece> pieces_;
  std::atomic<int> reads_ = 0, writes_ = 0, refused_ = 0;
};

TEST_F(DirectIoTest, NothingIsRefused) {
  On([](const std::string&, int, const FaultTransfer&) { return false; });
  ExpectAllGoesWell();
  EXPECT_GT(reads_, 10);
  EXPECT_GT(writes_, 10);
}

TEST_F(DirectIoTest, EveryTransferIsRefused) {
  On([](const std::string&, int, const FaultTransfer&) { return true; });
  ExpectAllGoesWell();
  EXPECT_GT(refused_, 5) << "of each file, once";
}

TEST_F(DirectIoTest, TransfersAreRefusedInTheMiddle) {
  for (const std::string op : {"pread", "pwrite"}) {
    for (const int every : {2, 3, 5}) {
      On([=](const std::string& is, int nth, const FaultTransfer&) {
        return is == op && nth % every == 0;
      });
      ExpectAllGoesWell();
    }
  }
  EXPECT_GT(refused_, 20);
}

TEST_F(DirectIoTest, LargerUnitsAreWantedAndNotSaid) {
  for (const uint64_t unit : {16384, 65536}) {
    On([=](const std::string&, int, const FaultTransfer& t) {
      return t.offset % unit != 0 || t.bytes % unit != 0 ||
             reinterpret_cast<uintptr_t>(t.memory) % unit != 0;
    });
    ExpectAllGoesWell();
  }
  EXPECT_GT(refused_, 0);
}

TEST_F(DirectIoTest, LargerUnitsAreKept) {
  for (const uint32_t unit : {16384u, 65536u}) {
    On(
        [=](const std::string&, int, const FaultTransfer& t) {
          return t.offset % unit != 0 || t.bytes % unit != 0 ||
                 reinterpret_cast<uintptr_t>(t.memory) % unit != 0;
        },
        unit);
    ExpectAllGoesWell();
  }
  EXPECT_GT(reads_, 20);
  EXPECT_GT(writes_, 20);
  EXPECT_EQ(refused_, 0);
}

TEST_F(DirectIoTest, OptionsLeaveItOut) {
  On([](const std::string&, int, const FaultTransfer&) { return false; });
  SaveSettings settings;
  settings.output.direct_io = false;
  ASSERT_OK(SaveAll(Path("c"), pieces_, settings).status());
  MergeSettings merge;
  merge.output.direct_io = false;
  ASSERT_OK(Merge(Path("c"), Path("out"), merge).status());
  const auto checkpoint = OpenCheckpoint(Path("out"));
  ASSERT_OK(checkpoint.status());
  Job verify, read;
  ASSERT_OK(
      RunVerifyJob(*checkpoint, {2, /*direct_io=*/false}, &verify).status());
  std::string out(tall_.bytes.size(), '\0');
  ReadPlan plan;
  plan.direct_io = false;
  plan.items.push_back({"tall", Box::Whole(tall_.shape), {}, 0});
  ASSERT_OK(RunReadJob(*checkpoint, plan,
                       {{reinterpret_cast<std::byte*>(out.data()),
                         tall_.shape,
                         {tall_.shape[1] * 4, 4},
                         4}},
                       &read)
                .status());
  EXPECT_TRUE(out == tall_.bytes);
  EXPECT_EQ(reads_, 0);
  EXPECT_EQ(writes_, 0);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
