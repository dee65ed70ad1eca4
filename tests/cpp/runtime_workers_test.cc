#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <system_error>
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
  Job job;
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
  Job job;
  EXPECT_TRUE(ForEachItem(1, 3, &job, [&](int64_t item, int) -> Status {
                if (item == 2) job.Cancel();
                return {};
              }).ok());
}

TEST(ForEachItem, GoesOnWithFewerThreads) {
  // No system has room for such a stack, so no thread can be made.
  pthread_attr_t usual, huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_attr_init(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 48), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  EXPECT_THROW(std::thread([] {}).join(), std::system_error);
  int64_t sum = 0;
  const Status status =
      ForEachItem(8, 10, nullptr, [&](int64_t item, int worker) -> Status {
        if (worker != 0) return Internal("a thread was made");
        sum += item;
        return {};
      });
  EXPECT_EQ(pthread_setattr_default_np(&usual), 0);
  pthread_attr_destroy(&huge);
  pthread_attr_destroy(&usual);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(sum, 45);
}

}  // namespace
}  // namespace torch_ckpt
