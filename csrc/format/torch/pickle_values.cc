#include "format/torch/pickle_values.h"

#include <span>

#include "format/names.h"

namespace torch_ckpt {
namespace {}  // namespace

Result<std::string> BytesOfPickle(const PickleValue& value, Budget* budget) {
  const PickleValue* said = &value;
  if (said->Is(PickleKind::kMade, PickleName::kBytearray)) {
    if (said->items().empty()) return std::string();
    said = &said->items()[0];
  }
  if (said->Is(PickleKind::kBytes)) {
    if (!budget->Touch(said->text().size())) return budget->Over();
    return std::string(said->text());
  }
  // What Python 3 says of empty bytes at protocol 2.
  if (said->Is(PickleKind::kMade, PickleName::kBytes) &&
      said->items().empty()) {
    return std::string();
  }
  if (!said->Is(PickleKind::kMade, PickleName::kEncode)) {
    return Corrupt("the object has bytes that are none");
  }
  const PickleValues arguments = said->items();
  if (arguments.size() != 2 || !arguments[0].Is(PickleKind::kString) ||
      !arguments[1].Is(PickleKind::kString) ||
      arguments[1].text() != "latin1") {
    return Corrupt("the object has bytes that are none");
  }
  const std::string_view text = arguments[0].text();
  if (!budget->Touch(text.size())) return budget->Over();
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c < 0x80) {
      out += text[i];
      continue;
    }
    // Two bytes of UTF-8 that stand for one of 0x80 to 0xff.
    if ((c != 0xc2 && c != 0xc3) || i + 1 == text.size()) {
      return Corrupt("the object has bytes that are none");
    }
    const auto next = static_cast<unsigned char>(text[++i]);
    out += static_cast<char>(static_cast<unsigned char>(c << 6) | (next & 63));
  }
  return out;
}

Result<std::string> ArrayTypeOfPickle(const PickleValue& value,
                                      Budget* budget) {
  const Status other =
      Unsupported("the object has a numpy value of a type of its own");
  if (!value.Is(PickleKind::kObject, PickleName::kArrayDtype)) return other;
  const PickleValues arguments = value.object().arguments.items();
  const PickleValue& state = value.object().state;
  if (arguments.empty() || !arguments[0].Is(PickleKind::kString) ||
      !state.Is(PickleKind::kTuple) || state.items().size() < 5) {
    return other;
  }
  const PickleValues parts = state.items();
  if (!parts[1].Is(PickleKind::kString) || !parts[2].Is(PickleKind::kNone) ||
      !parts[3].Is(PickleKind::kNone)) {
    return other;
  }
  std::string code = std::string(parts[1].text().substr(0, 1)) +
                     std::string(arguments[0].text().substr(0, 16));
  if (arguments[0].text().starts_with('M') ||
      arguments[0].text().starts_with('m')) {
    if (parts.size() != 9 || !parts[8].Is(PickleKind::kTuple) ||
        parts[8].items().size() != 2 ||
        !parts[8].items()[1].Is(PickleKind::kTuple) ||
        parts[8].items()[1].items().size() < 2) {
      return other;
    }
    const PickleValues unit = parts[8].items()[1].items();
    const Result<std::string> name = unit[0].Is(PickleKind::kString)
                                         ? std::string(unit[0].text())
                                         : BytesOfPickle(unit[0], budget);
    if (!name.ok() || name->size() > 8 || !unit[1].Is(PickleKind::kInt)) {
      return other;
    }
    if (*name != "generic") {
      const int64_t count = unit[1].integer();
      code += "[" + (count == 1 ? "" : std::to_string(count)) + *name + "]";
    }
  }
  if (!IsUtf8(code)) return other;
  return code;
}

std::optional<std::string_view> FactoryOfDefaultDict(const PickleValue& value) {
  const PickleValues arguments = value.object().arguments.items();
  if (arguments.empty()) return "none";
  switch (const PickleValue& factory = arguments[0]; factory.kind()) {
    case PickleKind::kNone:
      return "none";
    case PickleKind::kName:
      break;
    default:
      return std::nullopt;
  }
  switch (arguments[0].name()) {
    case PickleName::kBytearray:
      return "bytearray";
    case PickleName::kBytes:
      return "bytes";
    case PickleName::kComplex:
      return "complex";
    case PickleName::kFrozenSet:
      return "frozenset";
    case PickleName::kOrderedDict:
      return "OrderedDict";
    case PickleName::kSet:
      return "set";
    case PickleName::kUnknown:
      break;
    default:
      return std::nullopt;
  }
  std::string_view name = arguments[0].text();
  // Protocol 2 has the names of Python 2.
  for (const std::string_view module : {"builtins.", "__builtin__."}) {
    if (!name.starts_with(module)) continue;
    name.remove_prefix(module.size());
    if (name == "unicode") return "str";
    if (name == "long") return "int";
    for (const std::string_view type :
         {"bool", "dict", "float", "int", "list", "str", "tuple"}) {
      if (name == type) return type;
    }
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
