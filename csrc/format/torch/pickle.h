// What a pickle says, without doing any of it.
//
// A pickle is a program for a stack machine that builds Python objects. Here it
// runs against a machine that can do nothing but take notes: names come from a
// static list (pickle_names.h), what the program would construct or call is a
// record of what with which arguments, and nothing is imported or executed.
// Bounded: every operation reads at least a byte and keeps a few, and what is
// kept is limited as a multiple of the bytes read.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/status.h"
#include "format/torch/pickle_names.h"

namespace torch_ckpt {

enum class PickleKind : uint8_t {
  kNone,  // items(): none
  kBool,
  kInt,
  kBigInt,  // text(): two's complement, little-endian, more than 8 bytes
  kFloat,
  kString,      // text(): UTF-8, which is not checked
  kBytes,       // text()
  kTuple,       // items()
  kList,        // items()
  kSet,         // items()
  kDict,        // items(): key, value, key, value, ...
  kName,        // name(), and dtype() of a dtype or storage; text(), as
                // "module.name", of one that is not on the list
  kMade,        // name(), and items(): the arguments that it is made of
  kObject,      // name(), and what object() says
  kPersistent,  // items()[0]: the persistent id
};

const char* PickleKindName(PickleKind kind);

class PickleArena;
struct PickleSequence;
struct PickleObject;

class PickleValue;
using PickleValues = std::span<const PickleValue>;

// 8 bytes, since there are millions: a kind, a name, and 48 bits of a number or
// of an address. (A process has no longer ones on x86-64 and arm64, unless it
// asks for them.) What it points to belongs to the Pickle, or is the operation
// in the bytes read.
class PickleValue {
 public:
  PickleValue() = default;

  PickleKind kind() const { return static_cast<PickleKind>(bits_ & 0xff); }
  bool Is(PickleKind kind) const { return this->kind() == kind; }
  bool Is(PickleKind kind, PickleName name) const {
    return (bits_ & 0xffff) == PickleValue(kind, name).bits_;
  }
  // Whether it is this very value: text or number are not looked at.
  bool IsSame(const PickleValue& other) const { return bits_ == other.bits_; }
  // Each REQUIRES a kind that has it, above.
  bool boolean() const { return Payload() != 0; }
  int64_t integer() const {
    return IsLong() ? *At<const int64_t>() : Payload();
  }
  double real() const;
  std::string_view text() const;
  PickleName name() const { return static_cast<PickleName>(bits_ >> 8 & 0xff); }
  Dtype dtype() const { return static_cast<Dtype>(bits_ >> 16 & 0xff); }
  PickleValues items() const;
  const PickleObject& object() const { return *At<const PickleObject>(); }

 private:
  friend class PickleMachine;

  // In place of a name, of which ints have none.
  static constexpr PickleName kLongMark{1};

  explicit PickleValue(PickleKind kind, PickleName name = {},
                       int64_t number = 0)
      : bits_(static_cast<uint64_t>(number) << 16 |
              static_cast<uint64_t>(name) << 8 | static_cast<uint64_t>(kind)) {}
  PickleValue(PickleKind kind, PickleName name, const void* at)
      : PickleValue(kind, name, reinterpret_cast<intptr_t>(at)) {}

  // A kInt of more than 48 bits.
  static PickleValue Long(const int64_t* at) {
    return {PickleKind::kInt, kLongMark, at};
  }
  bool IsLong() const { return name() == kLongMark; }
  int64_t Payload() const { return static_cast<int64_t>(bits_) >> 16; }
  template <class T>
  T* At() const {
    return reinterpret_cast<T*>(bits_ >> 16);
  }

  uint64_t bits_ = 0;  // a kNone
};
static_assert(sizeof(PickleValue) == 8 && sizeof(void*) == 8);

// Of what may grow.
struct PickleSequence {
  PickleValue* values = nullptr;
  uint32_t size = 0, capacity = 0;
};

// Made by a name on the list that has a state or items.
struct PickleObject {
  PickleValue arguments;  // a tuple
  PickleValue state;      // kNone until BUILD
  PickleValue items;  // a kDict, a deque's kList; kNone where none was added
};

inline std::span<const PickleValue> PickleValue::items() const {
  switch (kind()) {
    case PickleKind::kNone:
      return {};
    case PickleKind::kList:
    case PickleKind::kSet:
    case PickleKind::kDict: {
      const auto* sequence = At<const PickleSequence>();
      return {sequence->values, sequence->size};
    }
    default: {
      // How many there are stands before them.
      const auto* size = At<const PickleValue>();
      if (!size) return {};
      return {size + 1, static_cast<size_t>(size->Payload())};
    }
  }
}

// The value of `key`, a string, in a dict: the last one, as Python has it. Null
// where there is none.
const PickleValue* FindKey(std::span<const PickleValue> dict,
                           std::string_view key);
// An attribute of an object: `name` in its state, where that is a dict of at
// most 100 names, or a pair of such (attributes, slots). Null where there is
// none.
const PickleValue* FindAttribute(const PickleObject& object,
                                 std::string_view name);

// What becomes of names that are not on the list. A record of one may stand
// wherever any value can, and what it would make is a kObject of it, whose
// state and items are whatever the pickle adds to it.
enum class UnknownNames : uint8_t { kRefuse, kRecord };

// The name that `value` is or was made by, where that is not on the list; else
// empty.
std::string_view UnknownName(const PickleValue& value);
// kUnsupported, of what UnknownName says.
Status RefuseUnknownName(std::string_view name);

// Immutable; const access is thread-safe. Values may hold themselves: whoever
// follows them bounds how deep.
class Pickle {
 public:
  // Reads one pickle of protocol 2 to 5 from the start of `bytes`, which
  // outlive the result. kCorrupt for what is no pickle, kUnsupported for an
  // operation that is not on the list, or a name under kRefuse, with its name;
  // kExhausted where values take more than Budget::MostKept of `bytes`.
  static Result<Pickle> Parse(ByteSpan bytes, UnknownNames unknown);

  const PickleValue& root() const { return root_; }
  // Of the pickle, STOP included.
  size_t bytes() const { return bytes_; }

 private:
  friend class PickleMachine;

  std::shared_ptr<PickleArena> arena_;
  PickleValue root_;
  size_t bytes_ = 0;
};

}  // namespace torch_ckpt
