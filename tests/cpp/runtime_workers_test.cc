#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

TEST(ForEachItem, VisitsEachItemOnce) {
  for (int workers : {-1, 0, 1, 3, 16}) {
    std::vector<std::atomic<int>> visits(100);
    const Status status = ForEachItem(workers, 100, nullptr,
                                      [&](int64_t item, int worker) -> Status {
                                        EXPECT_GE(worker, 0);
                                        EXPECT_LT(worker, std::max(workers, 1));
                                        ++visits[static_cast<size_t>(item)];
                                        return {};
                                      });
    EXPECT_TRUE(status.ok());
    for (auto& v : visits) EXPECT_EQ(v, 1);
  }
}

TEST(ForEachItem, OneWorkerIsTheCallerInOrder) {
  const auto caller = std::this_thread::get_id();
  std::vector<int64_t> order;
  EXPECT_TRUE(ForEachItem(1, 5, nullptr, [&](int64_t item, int) -> Status {
                EXPECT_EQ(std::this_thread::get_id(), caller);
                order.push_back(item);
                return {};
              }).ok());
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(ForEachItem, NoItemsIsNoWork) {
  const auto never = [](int64_t, int) -> Status { return Internal("called"); };
  EXPECT_TRUE(ForEachItem(4, 0, nullptr, never).ok());
  EXPECT_TRUE(ForEachItem(4, -3, nullptr, never).ok());
}

TEST(ForEachItem, StopsAfterTheFirstError) {
  std::atomic<int> started{0};
  const Status status =
      ForEachItem(3, 100000, nullptr, [&](int64_t item, int) -> Status {
        ++started;
        if (item == 5) return Corrupt("item 5");
        return {};
      });
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(status.message(), "item 5");
  EXPECT_LT(started, 100000);

  started = 0;
  EXPECT_FALSE(ForEachItem(1, 10, nullptr, [&](int64_t item, int) -> Status {
                 ++started;
                 return item == 5 ? Corrupt("") : Status();
               }).ok());
  EXPECT_EQ(started, 6);
}

TEST(ForEachItem, ExceptionsBecomeErrors) {
  const auto run = [](auto thrower) {
    return ForEachItem(2, 4, nullptr, [&](int64_t, int) -> Status {
      thrower();
      return {};
    });
  };
  EXPECT_EQ(run([] { throw std::bad_alloc(); }).kind(), ErrorKind::kExhausted);
  const Status status = run([] { throw std::runtime_error("what it says"); });
  EXPECT_EQ(status.kind(), ErrorKind::kInternal);
  EXPECT_NE(status.message().find("what it says"), std::string::npos);
  EXPECT_EQ(run([] { throw 7; }).kind(), ErrorKind::kInternal);
}

TEST(ForEachItem, CancelStopsIt) {
  Job job(JobKind::kWrite);
  std::atomic<int> started{0};
  const Status status =
      ForEachItem(2, 100000, &job, [&](int64_t item, int) -> Status {
        ++started;
        if (item == 3) job.Cancel();
        return {};
      });
  EXPECT_EQ(status.kind(), ErrorKind::kCancelled);
  EXPECT_LT(started, 100000);
  EXPECT_EQ(
      ForEachItem(2, 1, &job,
                  [&](int64_t, int) -> Status { return Internal("called"); })
          .kind(),
      ErrorKind::kCancelled);
}

TEST(ForEachItem, ACancelAfterTheLastItemChangesNothing) {
  Job job(JobKind::kWrite);
  EXPECT_TRUE(ForEachItem(1, 3, &job, [&](int64_t item, int) -> Status {
                if (item == 2) job.Cancel();
                return {};
              }).ok());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ForEachItem, GoesOnWithFewerThreads) {
  // In a child, since the limit on address space cannot be taken back: no
  // stack can be mapped for a thread then.
  const pid_t child = fork();
  if (child == 0) {
    const rlimit none{1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_AS, &none) != 0) _exit(2);
    int64_t sum = 0;  // by one thread only
    const Status status =
        ForEachItem(8, 10, nullptr, [&](int64_t item, int worker) -> Status {
          if (worker != 0) _exit(3);
          sum += item;
          return {};
        });
    _exit(status.ok() && sum == 45 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace torch_ckpt
