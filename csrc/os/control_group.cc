#include "os/control_group.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "os/machine.h"

namespace torch_ckpt {
namespace {

// What one version of control groups calls things. The limit of version 1 is a
// number near 2^63 where there is none; version 2 says "max", which is none.
struct Names {
  const char* mount;
  const char* limit;
  const char* used;
  const char* cached;  // in memory.stat, with what is below
};
constexpr Names kVersion1 = {"/sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                             "/memory.usage_in_bytes", "total_cache "};
constexpr Names kVersion2 = {"/sys/fs/cgroup", "/memory.max", "/memory.current",
                             "file "};

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t number = 0;
  const auto parsed =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc()) return std::nullopt;
  return number;
}

// What stands behind `name` at the beginning of a line.
std::optional<uint64_t> Field(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    if (text.starts_with(name)) return Number(text.substr(name.size()));
    text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  }
  return std::nullopt;
}

// In the group at `path` and those above it, which bind as well.
std::optional<uint64_t> Room(const std::string& root, const Names& names,
                             std::string path) {
  std::optional<uint64_t> room;
  while (true) {
    const std::string group = root + names.mount + path;
    const auto limit = Number(ReadSystemFile(group + names.limit));
    const auto used = Number(ReadSystemFile(group + names.used));
    const auto cached =
        Field(ReadSystemFile(group + "/memory.stat"), names.cached);
    if (limit && used && cached) {
      const uint64_t taken = *used - std::min(*used, *cached);
      const uint64_t left = *limit - std::min(*limit, taken);
      room = std::min(room.value_or(left), left);
    }
    if (path.empty()) return room;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

std::optional<uint64_t> ControlGroupRoom(const std::string& root) {
  // A line of headings, then one for each area.
  const std::string swaps = ReadSystemFile(root + "/proc/swaps");
  if (std::count(swaps.begin(), swaps.end(), '\n') > 1) return std::nullopt;
  const std::string groups = ReadSystemFile(root + "/proc/self/cgroup");
  std::optional<uint64_t> room;
  for (size_t at = 0; at < groups.size();) {
    const size_t end = std::min(groups.find('\n', at), groups.size());
    const std::string_view line(groups.data() + at, end - at);
    at = end + 1;
    // Number, controllers, path: "4:memory:/job" or "0::/job".
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string_view controllers =
        line.substr(first + 1, second - first - 1);
    const bool version_2 = controllers.empty();
    if (!version_2 && controllers != "memory") continue;
    std::string path(line.substr(second + 1));
    if (path.empty() || path[0] != '/') continue;
    if (path == "/") path.clear();
    const auto left = Room(root, version_2 ? kVersion2 : kVersion1, path);
    if (left) room = std::min(room.value_or(*left), *left);
  }
  return room;
}

}  // namespace torch_ckpt
