#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/handles.h"

namespace torch_ckpt {
namespace {

using Shared = HandleTable<std::shared_ptr<const std::string>>;
using Owned = HandleTable<std::unique_ptr<std::string>>;

TEST(HandleTable, FindsWhatItHolds) {
  Shared table("thing");
  auto object = std::make_shared<const std::string>("a");
  const int64_t id = *table.Add(object);
  EXPECT_GT(id, 0);
  EXPECT_EQ(*table.Find(id), object);
  EXPECT_EQ(*table.Find(id), object);  // it stays
  EXPECT_EQ(*table.Take(id), object);
  EXPECT_EQ(object.use_count(), 1);
  EXPECT_EQ(table.Find(id).status().kind(), ErrorKind::kInvalidArgument);
}

TEST(HandleTable, WhatIsTakenOutIsBackUnderItsId) {
  Owned table("thing");
  const int64_t id = *table.Add(std::make_unique<std::string>("a"));
  std::unique_ptr<std::string> taken = table.Take(id).value();
  EXPECT_EQ(*taken, "a");
  EXPECT_FALSE(table.Take(id).ok());  // somebody is at it
  table.PutBack(id, std::move(taken));
  EXPECT_EQ(**table.Take(id), "a");
}

TEST(HandleTable, StaleAndForeignIdsAreErrors) {
  Shared table("thing"), other("other");
  const int64_t stale = *table.Add(std::make_shared<const std::string>("a"));
  ASSERT_TRUE(table.Take(stale).ok());
  const int64_t foreign = *other.Add(std::make_shared<const std::string>("b"));
  const int64_t fresh = *table.Add(std::make_shared<const std::string>("c"));
  EXPECT_NE(fresh, stale);
  for (const int64_t id : {stale, foreign, int64_t{0}, int64_t{-1}, INT64_MAX,
                           INT64_MIN, fresh + 1000, -fresh}) {
    const Status status = table.Find(id).status();
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument) << id;
    EXPECT_EQ(status.message(), "unknown thing " + std::to_string(id));
    EXPECT_EQ(table.Take(id).status().kind(), ErrorKind::kInvalidArgument)
        << id;
  }
  EXPECT_EQ(**table.Find(fresh), "c");
}

TEST(HandleTable, ThreadsGetIdsOfTheirOwn) {
  Owned table("thing");
  std::mutex mutex;
  std::set<int64_t> seen;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const int64_t id = *table.Add(std::make_unique<std::string>("a"));
        EXPECT_TRUE(table.Take(id).ok());
        std::lock_guard<std::mutex> lock(mutex);
        EXPECT_TRUE(seen.insert(id).second);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(HandleTable, AForkedChildIsRefused) {
  Shared table("thing");
  const int64_t id = *table.Add(std::make_shared<const std::string>("a"));
  EXPECT_FALSE(InForkedChild());
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        InForkedChild() &&
        table.Add(nullptr).status().kind() == ErrorKind::kUnsupported &&
        table.Find(id).status().kind() == ErrorKind::kUnsupported &&
        table.Take(id).status().kind() == ErrorKind::kUnsupported;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(InForkedChild());
  EXPECT_TRUE(table.Find(id).ok());
}

}  // namespace
}  // namespace torch_ckpt
