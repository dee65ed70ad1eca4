#include "engine/open/not_weights.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace torch_ckpt {
namespace {

constexpr size_t kLooked = 256;
constexpr size_t kShown = 20;

}  // namespace

Status CheckNoStandIn(const File& file) {
  std::string text(kLooked, '\0');
  const Result<uint64_t> count =
      file.Read({reinterpret_cast<std::byte*>(text.data()), text.size()}, 0);
  if (!count.ok()) return {};
  text.resize(*count);
  if (text.empty()) {
    return Incomplete(
               "is empty: what should be in it was not copied, or not "
               "downloaded")
        .WithFile(file.path());
  }
  if (text.starts_with("version https://git-lfs.github.com/spec/")) {
    return Incomplete(
               "is a pointer of Git LFS: the weights themselves were "
               "not downloaded (git lfs pull gets them)")
        .WithFile(file.path());
  }
  std::string_view shown = text;
  while (!shown.empty() && std::isspace(static_cast<unsigned char>(shown[0]))) {
    shown.remove_prefix(1);
  }
  shown = shown.substr(0, kShown);
  const bool printable = std::all_of(
      shown.begin(), shown.end(),
      [](unsigned char c) { return std::isprint(c) || std::isspace(c); });
  if (!shown.starts_with('<') || !printable) return {};
  return Corrupt("is a page of HTML or XML and no weights: it begins with \"" +
                 std::string(shown.substr(0, shown.find_first_of("\r\n"))) +
                 "\"; download it again")
      .WithFile(file.path());
}

}  // namespace torch_ckpt
