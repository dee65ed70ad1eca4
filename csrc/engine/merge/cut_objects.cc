#include "engine/merge/cut_objects.h"

#include "format/json.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kObjects = ",\"objects\":{\n";
constexpr std::string_view kSideBytes = "\"side_bytes\":";
constexpr std::string_view kEnd = "}}";
// How a value names bytes of the side file. A dict of the user's may look like
// it, for which a side file stays that nobody needs.
constexpr std::string_view kAt = "\"at\":[";

class OneKey final : public JsonHandler {
 public:
  bool OnBeginObject() override { return true; }
  bool OnEndObject() override { return true; }
  bool OnNull() override { return true; }
  bool OnKey(std::string_view key) override {
    key_ = key;
    return true;
  }
  const std::string& key() const { return key_; }

 private:
  std::string key_;
};

Status Malformed() { return Corrupt("is no objects file, a leaf a line"); }

// The name that a line begins with.
Result<std::string> NameOf(std::string_view line) {
  size_t end = 1;
  while (end < line.size() && line[end] != '"') {
    end += line[end] == '\\' ? 2 : 1;
  }
  if (!line.starts_with('"') || end + 1 >= line.size() ||
      line[end + 1] != ':') {
    return Malformed();
  }
  OneKey found;
  TC_RETURN_IF_ERROR(ParseJson(
      "{" + std::string(line.substr(0, end + 1)) + ":null}", 1, &found));
  return found.key();
}

}  // namespace

Result<CutText> CutObjects(
    std::string_view text,
    const std::function<bool(std::string_view name)>& keeps) {
  const size_t head = text.find(kObjects);
  const size_t side = text.find(kSideBytes);
  if (head == std::string_view::npos || side > head) return Malformed();
  std::string lines;
  CutText out;
  text.remove_prefix(head + kObjects.size());
  const std::string_view before(text.data() - head - kObjects.size(), head);
  for (;;) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return Malformed();
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line == kEnd) break;
    if (line.ends_with(',')) line.remove_suffix(1);
    if (line.empty()) continue;
    TC_ASSIGN_OR_RETURN(const std::string name, NameOf(line));
    if (!keeps(name)) continue;
    lines += out.any ? ",\n" : "";
    lines += line;
    out.any = true;
    out.sides = out.sides || line.find(kAt) != std::string_view::npos;
  }
  if (!text.empty()) return Malformed();
  out.text = before.substr(0, side + kSideBytes.size());
  out.text += out.sides ? before.substr(side + kSideBytes.size()) : "0";
  out.text += kObjects;
  out.text += lines;
  out.text += "\n}}\n";
  return out;
}

}  // namespace torch_ckpt
