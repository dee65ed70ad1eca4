#include "format/torch/pickle.h"

#include <bit>
#include <string>

#include "base/bytes.h"
#include "format/torch/pickle_ops.h"

namespace torch_ckpt {

const char* PickleKindName(PickleKind kind) {
  constexpr const char* kNames[] = {"None",   "bool",   "int",          "int",
                                    "float",  "str",    "bytes",        "tuple",
                                    "list",   "set",    "dict",         "name",
                                    "object", "object", "persistent id"};
  return kNames[static_cast<size_t>(kind)];
}

double PickleValue::real() const {
  return std::bit_cast<double>(
      __builtin_bswap64(Load<uint64_t>(At<const char>() + 1)));
}

std::string_view PickleValue::text() const {
  const char* at = At<const char>();
  if (Is(PickleKind::kName)) {
    // As PickleMachine::PushUnknownName keeps it.
    const auto size = Load<PickleValue>(at).Payload();
    return {at + sizeof(PickleValue), static_cast<size_t>(size)};
  }
  // The operation, the size, the text.
  const auto op = static_cast<PickleOp>(*at++);
  switch (op) {
    case PickleOp::kShortBinUnicode:
    case PickleOp::kShortBinString:
    case PickleOp::kShortBinBytes:
    case PickleOp::kLong1:
      return {at + sizeof(uint8_t), Load<uint8_t>(at)};
    case PickleOp::kBinUnicode8:
    case PickleOp::kBinBytes8:
    case PickleOp::kByteArray8:
      return {at + sizeof(uint64_t), Load<uint64_t>(at)};
    default:
      return {at + sizeof(uint32_t), Load<uint32_t>(at)};
  }
}

const PickleValue* FindKey(std::span<const PickleValue> dict,
                           std::string_view key) {
  for (size_t i = dict.size(); i >= 2; i -= 2) {
    const PickleValue& each = dict[i - 2];
    if (each.Is(PickleKind::kString) && each.text() == key) return &dict[i - 1];
  }
  return nullptr;
}

namespace {

// Many objects may share one large dict, in which nobody is to search for each.
const PickleValue* FindOneOf(std::span<const PickleValue> dict,
                             std::string_view key) {
  constexpr size_t kMostAttributes = 100;
  return dict.size() / 2 <= kMostAttributes ? FindKey(dict, key) : nullptr;
}

}  // namespace

const PickleValue* FindAttribute(const PickleObject& object,
                                 std::string_view name) {
  if (object.state.Is(PickleKind::kDict)) {
    return FindOneOf(object.state.items(), name);
  }
  if (!object.state.Is(PickleKind::kTuple) ||
      object.state.items().size() != 2) {
    return nullptr;
  }
  for (const PickleValue& part : object.state.items()) {
    if (!part.Is(PickleKind::kDict)) continue;
    if (const PickleValue* found = FindOneOf(part.items(), name)) return found;
  }
  return nullptr;
}

std::string_view UnknownName(const PickleValue& value) {
  const PickleValue* name = &value;
  // As PickleMachine::Make keeps it.
  if (value.Is(PickleKind::kObject, PickleName::kUnknown)) {
    name = &value.object().arguments.items()[0];
  }
  return name->Is(PickleKind::kName, PickleName::kUnknown) ? name->text()
                                                           : std::string_view();
}

Status RefuseUnknownName(std::string_view name) {
  return Unsupported("the pickle names " + std::string(name) +
                     ", which is not on the list of what is read without "
                     "running code");
}

}  // namespace torch_ckpt
