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
#include "format/pickle_names.h"

namespace torch_ckpt {

enum class PickleKind : uint8_t {
  kNone,
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

// 16 bytes; what it points to belongs to the Pickle, or is the text read.
class PickleValue {
 public:
  PickleValue() = default;

  PickleKind kind() const { return kind_; }
  bool Is(PickleKind kind) const { return kind_ == kind; }
  bool Is(PickleKind kind, PickleName name) const {
    return kind_ == kind && name_ == name;
  }
  // Each REQUIRES a kind that has it, above.
  bool boolean() const { return number_ != 0; }
  int64_t integer() const { return number_; }
  double real() const { return real_; }
  std::string_view text() const { return {text_, size_}; }
  PickleName name() const { return name_; }
  Dtype dtype() const { return dtype_; }
  std::span<const PickleValue> items() const;
  const PickleObject& object() const { return *object_; }

 private:
  friend class PickleMachine;

  PickleKind kind_ = PickleKind::kNone;
  PickleName name_{};
  Dtype dtype_{};
  uint32_t size_ = 0;  // of the text or of a tuple
  union {
    int64_t number_ = 0;
    double real_;
    const char* text_;
    const PickleValue* values_;  // of a tuple, and of what is made
    PickleSequence* sequence_;   // of what may grow
    PickleObject* object_;
  };
};
static_assert(sizeof(PickleValue) == 16);

struct PickleSequence {
  PickleValue* values = nullptr;
  uint32_t size = 0, capacity = 0;
};

// Made by a name on the list that has a state or items.
struct PickleObject {
  PickleValue arguments = {};  // a tuple
  PickleValue state = {};      // kNone until BUILD
  PickleSequence items = {};   // of a dict as in kDict, of a deque as in kList
};

inline std::span<const PickleValue> PickleValue::items() const {
  switch (kind_) {
    case PickleKind::kList:
    case PickleKind::kSet:
    case PickleKind::kDict:
      return {sequence_->values, sequence_->size};
    default:
      return {values_, size_};
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
  // kExhausted where values take more than 100 times `bytes` and a MiB.
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
