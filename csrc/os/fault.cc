#include "os/fault.h"

#ifdef TORCH_CKPT_FAULTS

#include <signal.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

using Hook = std::function<FaultAction(const FaultSite&)>;

struct Rule {
  std::string op;    // "*" is any, "direct" any transfer past the cache
  uint64_t nth = 0;  // 0: every one
  FaultAction action;
  int signal = 0;  // to this process, before the call is made
};

int ErrnoByName(const std::string& name) {
  constexpr int kLastErrno = 200;
  for (int e = 1; e < kLastErrno; ++e) {
    const char* candidate = strerrorname_np(e);
    if (candidate != nullptr && name == candidate) return e;
  }
  return 0;
}

bool ParseRule(std::string_view text, Rule* rule) {
  const size_t first = text.find(':');
  if (first == std::string_view::npos || first == 0) return false;
  const size_t second = text.find(':', first + 1);
  if (second == std::string_view::npos) return false;
  const std::string_view number = text.substr(first + 1, second - first - 1);
  if (number != "*") {
    const char* const end = number.data() + number.size();
    const auto parsed = std::from_chars(number.data(), end, rule->nth);
    if (parsed.ec != std::errc() || rule->nth == 0 || parsed.ptr != end) {
      return false;
    }
  }
  rule->op = text.substr(0, first);
  const std::string action(text.substr(second + 1));
  if (action == "kill") {
    rule->signal = SIGKILL;
  } else if (action == "stop") {
    rule->signal = SIGSTOP;
  } else if (action == "short") {
    rule->action.short_count = true;
  } else if (action == "skip") {
    rule->action.skip = true;
  } else {
    rule->action.sys_errno = ErrnoByName(action);
    return rule->action.sys_errno != 0;
  }
  return true;
}

class Faults {
 public:
  static Faults& Process() {
    static Faults* const faults = new Faults;  // used until the very end
    return *faults;
  }

  FaultAction Visit(const FaultSite& site) {
    if (broken_) return {.sys_errno = EINVAL};
    std::shared_ptr<const Hook> hook;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      hook = hook_;
      if (!rules_.empty()) {
        const uint64_t any = ++counts_["*"];
        const uint64_t own = ++counts_[site.op];
        const bool direct = site.transfer && site.transfer->direct;
        const uint64_t past_cache = direct ? ++counts_["direct"] : 0;
        for (const Rule& rule : rules_) {
          const uint64_t nth = rule.op == "*"        ? any
                               : rule.op == "direct" ? past_cache
                               : rule.op == site.op  ? own
                                                     : 0;
          if (nth == 0 || (rule.nth != 0 && rule.nth != nth)) continue;
          // To this thread: of one to the process a SIGSTOP may reach another
          // thread first, while this one goes on to make the call.
          if (rule.signal != 0) raise(rule.signal);
          return rule.action;
        }
      }
    }
    return hook ? (*hook)(site) : FaultAction{};
  }

  void SetHook(Hook hook) {
    std::shared_ptr<const Hook> fresh;
    if (hook) fresh = std::make_shared<const Hook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    hook_ = std::move(fresh);
  }

 private:
  Faults() {
    const char* text = std::getenv("TORCH_CKPT_FAULTS");
    if (text == nullptr) return;
    std::string_view rest = text;
    while (!rest.empty()) {
      const std::string_view one = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), one.size() + 1));
      Rule rule;
      if (!ParseRule(one, &rule)) broken_ = true;
      rules_.push_back(std::move(rule));
    }
  }

  std::mutex mutex_;
  std::vector<Rule> rules_;
  // A test that misspells its faults must not pass for want of them: every
  // call fails with EINVAL then.
  bool broken_ = false;
  std::map<std::string, uint64_t, std::less<>> counts_;
  std::shared_ptr<const Hook> hook_;
};

}  // namespace

FaultAction FaultPoint(const char* op, const std::string& path,
                       const std::string& path2,
                       const FaultTransfer* transfer) {
  return Faults::Process().Visit({op, path, path2, transfer});
}

void SetFaultHook(Hook hook) { Faults::Process().SetHook(std::move(hook)); }

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
