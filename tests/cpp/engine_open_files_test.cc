#include <sys/resource.h>

#include <thread>

#include "engine/open/open_files.h"
#include "engine/read/verify_job.h"
#include "engine_test_util.h"
#include "runtime/arena.h"

namespace torch_ckpt {
namespace {

class OpenFilesTest : public EngineTest {
 protected:
  // One file for each row of "a", and as many tensors in each.
  void Save(int64_t files, int64_t tensors) {
    for (int64_t t = 0; t < tensors; ++t) {
      arrays_.push_back(
          MakeArray(Dtype::kU8, {files, 8}, static_cast<uint32_t>(t)));
    }
    for (int64_t t = 0; t < tensors; ++t) {
      for (Piece& p : GridPieces("t" + std::to_string(t),
                                 arrays_[static_cast<size_t>(t)], {files, 1})) {
        pieces_.push_back(p);
      }
    }
    ASSERT_OK(SaveAll(Path("c"), pieces_).status());
    auto opened = OpenCheckpoint(Path("c"));
    ASSERT_OK(opened.status());
    checkpoint_ = *opened;
  }
  std::string Name(size_t file) { return checkpoint_->files()[file].name; }

  std::vector<Array> arrays_;
  std::vector<Piece> pieces_;
  CheckpointPtr checkpoint_;
};

TEST_F(OpenFilesTest, TheSameFileIsOpenedOnce) {
  Save(3, 1);
  OpenFiles files(checkpoint_->file_set(), true);
  const auto first = files.Get(1);
  ASSERT_OK(first.status());
  EXPECT_EQ(*first, *files.Get(1));
  EXPECT_NE(*first, *files.Get(2));
}

#ifdef TORCH_CKPT_FAULTS

// Opens of data files while `work` runs, and reads of their beginnings.
template <class Work>
std::pair<int, int> CountOpens(const Work& work) {
  std::atomic<int> opens = 0, reads = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.path.find("shard-") == std::string::npos) return {};
    if (site.op == std::string("openat")) ++opens;
    if (site.op == std::string("pread")) ++reads;
    return {};
  });
  work();
  SetFaultHook(nullptr);
  return {opens, reads};
}

TEST_F(OpenFilesTest, JobsOpenEachOfManyFilesOnce) {
  constexpr int kFiles = 600;
  Save(kFiles, 20);
  const auto merge = [&] { ASSERT_OK(Merge(Path("c"), Path("out")).status()); };
  const auto read = [&] {
    for (size_t t = 0; t < arrays_.size(); ++t) {
      ASSERT_OK(ReadBox(checkpoint_, "t" + std::to_string(t),
                        Box::Whole(arrays_[t].shape))
                    .status());
    }
  };
  const auto verify = [&] {
    Job job;
    ASSERT_OK(RunVerifyJob(checkpoint_, {4}, &job).status());
  };
  EXPECT_EQ(CountOpens(merge).first, kFiles);
  EXPECT_EQ(CountOpens(verify).first, kFiles);
  EXPECT_EQ(CountOpens(read).first, 20 * kFiles) << "a job for each tensor";
  const uint64_t before = ByteSource::OpenDescriptors();
  auto held = checkpoint_->LendFiles(true);
  EXPECT_EQ(CountOpens(read).first, kFiles) << "held open between the jobs";
  EXPECT_EQ(CountOpens(read).first, 0);
  EXPECT_EQ(CountOpens(verify).first, kFiles) << "anew all the same";
  ASSERT_TRUE(std::filesystem::remove(Path("c/" + Name(7))));
  Job job;
  EXPECT_EQ(RunVerifyJob(checkpoint_, {4}, &job).status().kind(),
            ErrorKind::kIncomplete)
      << "though the file is open";
  held = nullptr;
  EXPECT_EQ(ByteSource::OpenDescriptors(), before);
}

// Under a limit it closes what was used longest ago, and what was proved of a
// file once is not read again.
TEST_F(OpenFilesTest, ALimitOnDescriptorsIsKept) {
  constexpr int kFiles = 100;
  Save(kFiles, 1);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const uint64_t used = Directory::Open("/proc/self/fd")->List()->size();
  rlimit low = before;
  low.rlim_cur = used + 40;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  uint64_t most = 0;
  const auto [opens, reads] = CountOpens([&] {
    OpenFiles files(checkpoint_->file_set(), true);
    for (int round = 0; round < 2; ++round) {
      for (uint32_t f = 0; f < kFiles; ++f) {
        EXPECT_OK(files.Get(f).status());
        most = std::max(most, ByteSource::OpenDescriptors());
      }
    }
  });
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LE(most, 32u);
  EXPECT_GE(most, 20u);
  EXPECT_EQ(opens, 2 * kFiles);
  EXPECT_EQ(reads, kFiles) << "the id of each, once";
}

// Also where what is open opens a second descriptor: it was looked at through
// the page cache, and is read past it.
TEST_F(OpenFilesTest, ALimitIsKeptByFilesThatAreReadBothWays) {
  constexpr int kFiles = 60;
  constexpr uint64_t kBytes = uint64_t{512} << 10;
  const Array array = MakeArray(Dtype::kU8, {kFiles, kBytes}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", array, {kFiles, 1})).status());
  checkpoint_ = *OpenCheckpoint(Path("c"));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const uint64_t used = Directory::Open("/proc/self/fd")->List()->size();
  const uint64_t others = ByteSource::OpenDescriptors();
  rlimit low = before;
  low.rlim_cur = used + 40;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  uint64_t most = 0;
  {
    Job job;
    const auto lease = LeaseBuffer(kBytes + ByteSource::kSlack, &job);
    ASSERT_OK(lease.status());
    OpenFiles files(checkpoint_->file_set(), true);
    const auto look = [](const File& file) { return file.Stat().status(); };
    for (int round = 0; round < 4; ++round) {
      for (uint32_t f = 0; f < kFiles; ++f) {
        const auto source = files.Get(f);
        EXPECT_OK(source.status());
        if (!source.ok()) continue;
        if (round % 2 == 0) {
          EXPECT_OK((*source)->ThroughCache(look));
          std::byte byte{};
          EXPECT_OK((*source)->ReadCached({&byte, 1}, 0).status());
        } else {
          EXPECT_OK((*source)->Read(4096, kBytes, lease->span()).status());
        }
        most = std::max(most, ByteSource::OpenDescriptors() - others);
      }
    }
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LE(most, 33u);
}

TEST_F(OpenFilesTest, WhenNoDescriptorIsLeftOthersAreClosed) {
  Save(20, 1);
  int opens = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.path.find("shard-") == std::string::npos) return {};
    const bool hit = site.op == std::string("openat") && ++opens % 6 == 0;
    return {.sys_errno = hit ? EMFILE : 0};
  });
  OpenFiles files(checkpoint_->file_set(), true);
  for (uint32_t f = 0; f < 20; ++f) EXPECT_OK(files.Get(f).status());
  EXPECT_LT(ByteSource::OpenDescriptors(), 10u);
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = site.op == std::string("openat") ? EMFILE : 0};
  });
  EXPECT_EQ(files.Get(0).status().sys_errno(), EMFILE);
  SetFaultHook(nullptr);
  EXPECT_OK(files.Get(0).status());
}

// A file that is slow to open holds back nobody who wants another one.
TEST_F(OpenFilesTest, OpeningIsOutsideTheLock) {
  Save(2, 1);
  OpenFiles files(checkpoint_->file_set(), true);
  std::atomic<bool> began = false, go_on = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("openat") && site.path.ends_with(Name(0))) {
      began = true;
      while (!go_on) std::this_thread::yield();
    }
    return {};
  });
  std::thread slow([&] { EXPECT_OK(files.Get(0).status()); });
  while (!began) std::this_thread::yield();
  EXPECT_OK(files.Get(1).status());
  go_on = true;
  slow.join();
  SetFaultHook(nullptr);
}

TEST_F(OpenFilesTest, AStaleHandleOfAReplacedCheckpointIsAConflict) {
  Save(2, 1);
  const CheckpointPtr old = checkpoint_;
  ASSERT_OK(SaveAll(Path("c"), pieces_).status());
  const auto stale = [](const FaultSite& site) -> FaultAction {
    const bool data = site.path.find("shard-") != std::string::npos;
    return {.sys_errno = data && site.op == std::string("pread") ? ESTALE : 0};
  };
  SetFaultHook(stale);
  const Status read = ReadBox(old, "t0", Box::Whole(arrays_[0].shape)).status();
  Job job;
  const Status verified = RunVerifyJob(old, {}, &job).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(read.kind(), ErrorKind::kConflict) << read.ToString();
  EXPECT_EQ(verified.kind(), ErrorKind::kConflict) << verified.ToString();
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
