#include <gtest/gtest.h>

#include "runtime/jobs.h"

namespace torch_ckpt {
namespace {

TEST(Job, CountsAndKeepsTheFirstError) {
  Job job;
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

TEST(Job, GoesOnWithWhoeverHoldsIt) {
  const int64_t id = *Jobs().Add(std::make_shared<Job>());
  const std::shared_ptr<Job> job = *Jobs().Find(id);
  EXPECT_TRUE(Jobs().Take(id).ok());
  EXPECT_EQ(Jobs().Find(id).status().message(),
            "unknown job " + std::to_string(id));
  job->AddDone(1);
  EXPECT_EQ(job->done(), 1u);
}

}  // namespace
}  // namespace torch_ckpt
