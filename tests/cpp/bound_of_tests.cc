// A bound for each test: one that hangs says its name and ends the process,
// which ./dev counts as a failure, instead of holding up everything.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace torch_ckpt {
namespace {

// On a busy machine and under sanitizers: no test takes a tenth of it.
constexpr unsigned kSeconds = 600;

char g_running[256];  // read by the handler, which may not allocate

void Overdue(int) {
  constexpr char kSays[] = "hangs: ";
  (void)!write(STDERR_FILENO, kSays, sizeof(kSays) - 1);
  (void)!write(STDERR_FILENO, g_running, strlen(g_running));
  abort();
}

class Bound : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo& test) override {
    std::snprintf(g_running, sizeof(g_running), "%s.%s\n",
                  test.test_suite_name(), test.name());
    signal(SIGALRM, Overdue);
    const char* const seconds = std::getenv("TORCH_CKPT_TEST_SECONDS");
    alarm(seconds == nullptr ? kSeconds
                             : static_cast<unsigned>(std::atoi(seconds)));
  }
  void OnTestEnd(const ::testing::TestInfo&) override { alarm(0); }
};

const bool g_added = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Bound);
  return true;
}();

}  // namespace
}  // namespace torch_ckpt
