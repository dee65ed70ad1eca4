// What the request "probe" writes. What it finds is in
// tests/python/test_cli_doctor.py.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>

#include "capi/requests.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

#ifdef TORCH_CKPT_FAULTS

using ProbeRequestsTest = TemporaryDirectory;

TEST_F(ProbeRequestsTest, NoTwoBlocksThatItMeasuresWithAreEqual) {
  constexpr uint64_t kBytes = uint64_t{24} << 20;
  constexpr size_t kBlock = 4096;
  std::mutex mutex;
  std::set<std::string> blocks;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) == "pwrite" &&
        std::filesystem::path(site.path).filename() == "speed") {
      std::lock_guard<std::mutex> lock(mutex);
      const auto* memory = static_cast<const char*>(site.transfer->memory);
      for (size_t at = 0; at < site.transfer->bytes; at += kBlock) {
        blocks.emplace(memory + at, kBlock);
      }
    }
    return {};
  });
  const auto found = capi::ProbeRequest({{"path", path()}, {"bytes", kBytes}});
  SetFaultHook(nullptr);
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ((*found)["directory"]["speed"]["bytes"], kBytes);
  EXPECT_EQ(blocks.size(), kBytes / kBlock);
}

TEST_F(ProbeRequestsTest, ItsFileHasNoNameWhenItHasASize) {
  bool seen = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) == "fallocate" &&
        std::filesystem::path(site.path).filename() == "speed") {
      seen = true;
      EXPECT_FALSE(std::filesystem::exists(site.path));
    }
    return {};
  });
  const auto found =
      capi::ProbeRequest({{"path", path()}, {"bytes", uint64_t{4} << 20}});
  SetFaultHook(nullptr);
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_TRUE(seen);
}

#endif

}  // namespace
}  // namespace torch_ckpt
