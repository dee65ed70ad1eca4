#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/jobs.h"

namespace torch_ckpt {
namespace {

TEST(Job, CountsAndKeepsTheFirstError) {
  Job job(JobKind::kMerge);
  EXPECT_EQ(job.kind(), JobKind::kMerge);
  job.AddTotal(10);
  job.AddDone(4);
  job.AddDone(3);
  EXPECT_EQ(job.total(), 10u);
  EXPECT_EQ(job.done(), 7u);
  EXPECT_FALSE(job.cancelled());
  job.Cancel();
  EXPECT_TRUE(job.cancelled());

  EXPECT_TRUE(job.Fail(Status()).ok());
  EXPECT_FALSE(job.failed());
  EXPECT_EQ(job.Fail(Corrupt("first")).message(), "first");
  EXPECT_EQ(job.Fail(Corrupt("second")).message(), "first");
  EXPECT_TRUE(job.failed());
  EXPECT_EQ(job.status().message(), "first");
  job.SetResult("{}");
  EXPECT_EQ(job.result(), "{}");
}

TEST(JobRegistry, FindsWhatItMade) {
  JobRegistry& registry = JobRegistry::Process();
  const int64_t before = registry.LiveCount();
  auto id = registry.Create(JobKind::kRead);
  ASSERT_TRUE(id.ok());
  EXPECT_GT(*id, 0);
  EXPECT_EQ(*id >> 56, static_cast<int64_t>(JobKind::kRead));
  EXPECT_EQ(registry.LiveCount(), before + 1);
  auto job = registry.Find(*id);
  ASSERT_TRUE(job.ok());
  EXPECT_EQ((*job)->kind(), JobKind::kRead);
  EXPECT_TRUE(registry.Free(*id).ok());
  EXPECT_EQ(registry.LiveCount(), before);
  (*job)->AddDone(1);  // whoever holds it may go on with it
}

TEST(JobRegistry, StaleAndForeignIdsAreErrors) {
  JobRegistry& registry = JobRegistry::Process();
  const int64_t stale = *registry.Create(JobKind::kWrite);
  ASSERT_TRUE(registry.Free(stale).ok());
  const int64_t fresh = *registry.Create(JobKind::kWrite);
  EXPECT_EQ(static_cast<uint32_t>(stale), static_cast<uint32_t>(fresh))
      << "the slot is used again, or the test shows nothing";
  const int64_t other_kind = fresh ^ (int64_t{1} << 56) ^ (int64_t{2} << 56);
  const int64_t ids[] = {
      stale, 0, -1, 7, INT64_MAX, INT64_MIN, fresh + 1000, -fresh, other_kind};
  for (const int64_t id : ids) {
    const Status status = registry.Find(id).status();
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument) << id;
    EXPECT_EQ(status.message(), "unknown job " + std::to_string(id));
    EXPECT_EQ(registry.Free(id).kind(), ErrorKind::kInvalidArgument) << id;
  }
  EXPECT_TRUE(registry.Free(fresh).ok());
}

TEST(JobRegistry, ThreadsGetIdsOfTheirOwn) {
  JobRegistry& registry = JobRegistry::Process();
  std::mutex mutex;
  std::set<int64_t> seen;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const int64_t id = *registry.Create(JobKind::kVerify);
        EXPECT_TRUE(registry.Find(id).ok());
        EXPECT_TRUE(registry.Free(id).ok());
        std::lock_guard<std::mutex> lock(mutex);
        EXPECT_TRUE(seen.insert(id).second);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(JobRegistry, AForkedChildRefuses) {
  JobRegistry& registry = JobRegistry::Process();
  const int64_t id = *registry.Create(JobKind::kRead);
  EXPECT_FALSE(InForkedChild());
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        InForkedChild() &&
        registry.Create(JobKind::kRead).status().kind() ==
            ErrorKind::kUnsupported &&
        registry.Find(id).status().kind() == ErrorKind::kUnsupported &&
        registry.Free(id).kind() == ErrorKind::kUnsupported;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(InForkedChild());
  EXPECT_TRUE(registry.Free(id).ok());
}

}  // namespace
}  // namespace torch_ckpt
