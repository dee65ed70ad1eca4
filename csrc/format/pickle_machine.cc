// The stack machine that reads pickles (pickle.h).
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "format/pickle.h"
#include "format/pickle_arena.h"
#include "format/pickle_ops.h"

namespace torch_ckpt {
namespace {

constexpr size_t kKeptPerByte = 100;
constexpr size_t kKeptAnyway = size_t{1} << 20;

// For messages: of a name in the pickle, which may be any text.
std::string Short(std::string_view name) {
  constexpr size_t kMost = 200;
  std::string out(name.substr(0, kMost));
  for (char& c : out) {
    if (c < 0x20 || c == 0x7f) c = '?';  // nor what is no ASCII
  }
  return out + (name.size() > kMost ? "..." : "");
}

template <class T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

class PickleMachine {
 public:
  PickleMachine(ByteSpan bytes, UnknownNames unknown)
      : unknown_(unknown),
        begin_(AsText(bytes).data()),
        at_(begin_),
        end_(begin_ + bytes.size()),
        arena_(std::make_shared<PickleArena>(kKeptAnyway +
                                             kKeptPerByte * bytes.size())) {
    // Of most pickles a bit more than is remembered. What is not used takes no
    // memory.
    memo_.reserve(bytes.size() / 10);
  }

  Result<Pickle> Run() {
    if (end_ - at_ < 2 || static_cast<PickleOp>(*at_) != PickleOp::kProto) {
      return Corrupt("is no pickle of protocol 2 or newer");
    }
    while (error_.ok() && !stopped_) Step();
    if (!error_.ok()) return error_;
    Pickle out;
    out.arena_ = std::move(arena_);
    out.root_ = stack_.back();
    out.bytes_ = static_cast<size_t>(at_ - begin_);
    return out;
  }

 private:
  // --- errors; the first is kept, and ends the run ---

  std::string Where() const {
    return " (byte " + std::to_string(at_ - begin_) + " of the pickle)";
  }
  void Fail(Status status) {
    if (error_.ok()) error_ = std::move(status);
  }
  void Damaged(const char* what) { Fail(Corrupt(what + Where())); }
  void Full() {
    Fail(Exhausted("the pickle makes more objects than " +
                   std::to_string(kKeptPerByte) + " bytes for each of its own" +
                   Where()));
  }

  // --- bytes ---

  // The next `size` bytes; null, and an error, where there are not so many.
  const char* Take(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) {
      Damaged("ends within an operation");
      return nullptr;
    }
    return std::exchange(at_, at_ + size);
  }
  template <class T>
  std::optional<T> Number() {
    const char* from = Take(sizeof(T));
    if (!from) return std::nullopt;
    return Load<T>(from);
  }
  std::optional<std::string_view> Line() {
    const void* found = std::memchr(at_, '\n', static_cast<size_t>(end_ - at_));
    if (!found) {
      Damaged("ends within a line");
      return std::nullopt;
    }
    const char* from = std::exchange(at_, static_cast<const char*>(found) + 1);
    return std::string_view(from, static_cast<const char*>(found));
  }

  // --- the stack ---

  size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }
  // Whether `count` values stand above the last mark.
  bool Has(size_t count) {
    if (stack_.size() - Floor() >= count) return true;
    Damaged("takes more than there is");
    return false;
  }
  // What stands above the last mark, which goes; they stay until Drop.
  std::optional<std::span<PickleValue>> SinceMark() {
    if (marks_.empty()) {
      Damaged("looks for a mark that is not there");
      return std::nullopt;
    }
    const size_t from = marks_.back();
    marks_.pop_back();
    return std::span(stack_).subspan(from);
  }
  void Drop(size_t count) { stack_.resize(stack_.size() - count); }
  void Push(PickleValue value) { stack_.push_back(value); }
  void Push(PickleKind kind) {
    PickleValue value;
    value.kind_ = kind;
    Push(value);
  }
  void PushInt(int64_t number) {
    PickleValue value;
    value.kind_ = PickleKind::kInt;
    value.number_ = number;
    Push(value);
  }
  void PushBool(bool truth) {
    PickleValue value;
    value.kind_ = PickleKind::kBool;
    value.number_ = truth;
    Push(value);
  }
  void PushText(PickleKind kind, std::optional<uint64_t> size) {
    if (!size) return;
    if (*size > UINT32_MAX) return Damaged("has a text above 4 GiB");
    const char* text = Take(*size);
    if (!text) return;
    PickleValue value;
    value.kind_ = kind;
    value.text_ = text;
    value.size_ = static_cast<uint32_t>(*size);
    Push(value);
  }
  void PushLong(std::optional<uint32_t> size) {
    if (!size) return;
    if (*size > 8) return PushText(PickleKind::kBigInt, *size);
    const char* raw = Take(*size);
    if (!raw) return;
    uint64_t bits = 0;
    std::memcpy(&bits, raw, *size);
    const unsigned unused = 64 - 8 * *size;
    PushInt(*size == 0 ? 0 : static_cast<int64_t>(bits << unused) >> unused);
  }
  void PushFloat() {
    const auto raw = Number<uint64_t>();
    if (!raw) return;
    PickleValue value;
    value.kind_ = PickleKind::kFloat;
    value.real_ = std::bit_cast<double>(__builtin_bswap64(*raw));
    Push(value);
  }

  // --- tuples and what grows ---

  // The top `count` values become one.
  void Collect(PickleKind kind, size_t count) {
    PickleValue value;
    value.kind_ = kind;
    value.size_ = static_cast<uint32_t>(count);
    PickleValue* items = nullptr;
    if (count > 0) {
      items = arena_->New<PickleValue>(count);
      if (!items) return Full();
      std::copy(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end(),
                items);
    }
    value.values_ = items;
    Drop(count);
    Push(value);
  }
  void PushSequence(PickleKind kind) {
    PickleValue value;
    value.kind_ = kind;
    value.sequence_ = arena_->New<PickleSequence>(1);
    if (!value.sequence_) return Full();
    *value.sequence_ = {};
    Push(value);
  }
  bool Extend(PickleSequence* to, std::span<const PickleValue> values) {
    const size_t size = to->size + values.size();
    if (size > UINT32_MAX) {
      Full();
      return false;
    }
    if (size > to->capacity &&
        arena_->Lengthen(to->values, to->capacity, size - to->capacity)) {
      to->capacity = static_cast<uint32_t>(size);
    }
    if (size > to->capacity) {
      const size_t capacity =
          std::min<size_t>(UINT32_MAX, std::max<size_t>(size, 2 * to->size));
      PickleValue* larger = arena_->New<PickleValue>(capacity);
      if (!larger) {
        Full();
        return false;
      }
      std::copy(to->values, to->values + to->size, larger);
      to->values = larger;
      to->capacity = static_cast<uint32_t>(capacity);
    }
    std::copy(values.begin(), values.end(), to->values + to->size);
    to->size = static_cast<uint32_t>(size);
    return true;
  }
  // What APPEND, SETITEM and their like add to; null, and an error, where it
  // takes none.
  PickleSequence* ItemsOf(const PickleValue& value, PickleKind kind) {
    if (value.kind_ == kind) return value.sequence_;
    if (value.kind_ == PickleKind::kObject) {
      const bool takes = value.name_ == PickleName::kUnknown ||
                         (kind == PickleKind::kDict
                              ? value.name_ == PickleName::kOrderedDict ||
                                    value.name_ == PickleName::kDefaultDict
                              : kind == PickleKind::kList &&
                                    value.name_ == PickleName::kDeque);
      if (takes) return &value.object_->items;
    }
    Fail(Corrupt(std::string("adds the items of a ") + PickleKindName(kind) +
                 " to a " + PickleKindName(value.kind_) + Where()));
    return nullptr;
  }
  // The last `count` values go to what stands below them.
  void AddItems(PickleKind kind, size_t count) {
    if (kind == PickleKind::kDict && count % 2 != 0) {
      return Damaged("sets a key without a value");
    }
    if (!Has(count + 1)) return;
    PickleSequence* to = ItemsOf(stack_[stack_.size() - count - 1], kind);
    if (!to) return;
    if (Extend(to, std::span(stack_).last(count))) Drop(count);
  }
  void AddSinceMark(PickleKind kind) {
    const auto values = SinceMark();
    if (values) AddItems(kind, values->size());
  }

  // --- names, and what they make ---

  void PushName(std::string_view module, std::string_view name) {
    const auto info = FindPickleName(module, name);
    if (!info) return PushUnknownName(Short(module) + "." + Short(name));
    PickleValue value;
    value.kind_ = PickleKind::kName;
    value.name_ = info->name;
    value.dtype_ = info->dtype;
    value.number_ = info->is_object;
    Push(value);
  }
  void PushUnknownName(const std::string& name) {
    if (unknown_ == UnknownNames::kRefuse) {
      Status refused = RefuseUnknownName(name);
      return Fail(Unsupported(refused.message() + Where()));
    }
    char* kept = arena_->New<char>(RoundUp(name.size(), sizeof(PickleValue)));
    if (!kept) return Full();
    std::copy(name.begin(), name.end(), kept);
    PickleValue value;
    value.kind_ = PickleKind::kName;
    value.name_ = PickleName::kUnknown;
    value.text_ = kept;
    value.size_ = static_cast<uint32_t>(name.size());
    Push(value);
  }
  void StackGlobal() {
    if (!Has(2)) return;
    const PickleValue name = stack_.back(), module = stack_[stack_.size() - 2];
    if (!name.Is(PickleKind::kString) || !module.Is(PickleKind::kString)) {
      return Damaged("names what is no text");
    }
    Drop(2);
    PushName(module.text(), name.text());
  }
  // REDUCE and NEWOBJ: a name and a tuple of arguments.
  void Make() {
    if (!Has(2)) return;
    const PickleValue arguments = stack_.back();
    const PickleValue name = stack_[stack_.size() - 2];
    if (!UnknownName(name).empty()) return MakeUnknown();
    if (!name.Is(PickleKind::kName) || !arguments.Is(PickleKind::kTuple)) {
      return Damaged("makes something of what is no name and no arguments");
    }
    PickleValue made = arguments;
    made.name_ = name.name_;
    made.dtype_ = name.dtype_;
    made.kind_ = PickleKind::kMade;
    if (name.number_) {
      made.kind_ = PickleKind::kObject;
      made.size_ = 0;
      made.object_ = arena_->New<PickleObject>(1);
      if (!made.object_) return Full();
      *made.object_ = {.arguments = arguments};
    }
    Drop(2);
    Push(made);
  }
  // What somebody's class or function makes of the two values on the top, or
  // what is called of that: an object of its name, whose arguments are that
  // name and those.
  void MakeUnknown() {
    PickleValue* const last = &stack_.back();
    PickleValue* const name = last - 1;
    if (name->Is(PickleKind::kObject)) {
      *name = name->object().arguments.items()[0];
    }
    Collect(PickleKind::kTuple, 2);
    if (!error_.ok()) return;
    PickleValue made;
    made.kind_ = PickleKind::kObject;
    made.name_ = PickleName::kUnknown;
    made.object_ = arena_->New<PickleObject>(1);
    if (!made.object_) return Full();
    *made.object_ = {.arguments = stack_.back()};
    stack_.back() = made;
  }
  // The top becomes what `name` makes of it.
  void Wrap(PickleName name) {
    Collect(PickleKind::kMade, 1);
    if (error_.ok()) stack_.back().name_ = name;
  }
  // NEWOBJ_EX: with named arguments, of which there must be none.
  void MakeWithNames() {
    if (!Has(3)) return;
    const PickleValue names = stack_.back();
    const bool known = UnknownName(stack_[stack_.size() - 3]).empty();
    if (known && (!names.Is(PickleKind::kDict) || !names.items().empty())) {
      return Fail(Unsupported("makes something of named arguments" + Where()));
    }
    Drop(1);
    Make();
  }
  void Build() {
    if (!Has(2)) return;
    const PickleValue state = stack_.back();
    const PickleValue target = stack_[stack_.size() - 2];
    if (!target.Is(PickleKind::kObject)) {
      return Fail(Unsupported(std::string("sets the state of a ") +
                              PickleKindName(target.kind_) + Where()));
    }
    if (!target.object_->state.Is(PickleKind::kNone) &&
        target.name_ != PickleName::kUnknown) {
      return Damaged("sets a state twice");
    }
    target.object_->state = state;
    Drop(1);
  }
  void Persistent() {
    if (!Has(1)) return;
    Collect(PickleKind::kPersistent, 1);
  }

  // --- the memo ---

  // Picklers count what they remember: an index is the next one, or one that
  // was there.
  void Put(std::optional<uint32_t> index) {
    if (!index || !Has(1)) return;
    if (*index > memo_.size()) return Damaged("remembers out of order");
    if (*index == memo_.size()) {
      memo_.push_back(stack_.back());
    } else {
      memo_[*index] = stack_.back();
    }
  }
  void Get(std::optional<uint32_t> index) {
    if (!index) return;
    if (*index >= memo_.size()) {
      return Damaged("recalls what was not remembered");
    }
    Push(PickleValue(memo_[*index]));
  }

  void Step();
  void Rarely(uint8_t op);

  const UnknownNames unknown_;
  const char* const begin_;
  const char* at_;
  const char* const end_;
  std::shared_ptr<PickleArena> arena_;
  std::vector<PickleValue> stack_, memo_;
  std::vector<size_t> marks_;  // heights of the stack
  bool stopped_ = false;
  Status error_;
};

// The operations that large pickles consist of.
void PickleMachine::Step() {
  const char* raw = Take(1);
  if (!raw) return;
  const auto op = static_cast<uint8_t>(*raw);
  using enum PickleOp;
  switch (static_cast<PickleOp>(op)) {
    case kMark:
      return marks_.push_back(stack_.size());
    case kNoneOp:
      return Push(PickleKind::kNone);
    case kNewTrue:
      return PushBool(true);
    case kNewFalse:
      return PushBool(false);
    case kBinInt:
      if (const auto n = Number<int32_t>()) PushInt(*n);
      return;
    case kBinInt1:
      if (const auto n = Number<uint8_t>()) PushInt(*n);
      return;
    case kBinInt2:
      if (const auto n = Number<uint16_t>()) PushInt(*n);
      return;
    case kLong1:
      return PushLong(Number<uint8_t>());
    case kShortBinUnicode:
      return PushText(PickleKind::kString, Number<uint8_t>());
    case kBinUnicode:
      return PushText(PickleKind::kString, Number<uint32_t>());
    case kEmptyTuple:
      return Collect(PickleKind::kTuple, 0);
    case kTuple1:
      return Has(1) ? Collect(PickleKind::kTuple, 1) : void();
    case kTuple2:
      return Has(2) ? Collect(PickleKind::kTuple, 2) : void();
    case kTuple3:
      return Has(3) ? Collect(PickleKind::kTuple, 3) : void();
    case kTupleOp:
      if (const auto values = SinceMark())
        Collect(PickleKind::kTuple, values->size());
      return;
    case kEmptyList:
      return PushSequence(PickleKind::kList);
    case kEmptyDict:
      return PushSequence(PickleKind::kDict);
    case kAppend:
      return AddItems(PickleKind::kList, 1);
    case kAppends:
      return AddSinceMark(PickleKind::kList);
    case kSetItem:
      return AddItems(PickleKind::kDict, 2);
    case kSetItems:
      return AddSinceMark(PickleKind::kDict);
    case kBinGet:
      return Get(Number<uint8_t>());
    case kLongBinGet:
      return Get(Number<uint32_t>());
    case kBinPut:
      return Put(Number<uint8_t>());
    case kLongBinPut:
      return Put(Number<uint32_t>());
    case kMemoize:
      return Put(static_cast<uint32_t>(memo_.size()));
    case kReduce:
    case kNewObj:
      return Make();
    case kBuild:
      return Build();
    default:
      return Rarely(op);
  }
}

void PickleMachine::Rarely(uint8_t op) {
  using enum PickleOp;
  switch (static_cast<PickleOp>(op)) {
    case kProto:
      if (const auto n = Number<uint8_t>(); n && (*n < 2 || *n > 5)) {
        Fail(Unsupported("is a pickle of protocol " + std::to_string(*n)));
      }
      return;
    case kFrame:
      if (const auto size = Number<uint64_t>();
          size && *size > static_cast<uint64_t>(end_ - at_)) {
        Damaged("ends within a frame");
      }
      return;
    case kStop:
      if (stack_.size() != 1 || !marks_.empty()) {
        return Damaged("stops with more or less than one value");
      }
      stopped_ = true;
      return;
    case kPop:
      return Has(1) ? Drop(1) : void();
    case kPopMark:
      if (const auto values = SinceMark()) Drop(values->size());
      return;
    case kDup:
      return Has(1) ? Push(PickleValue(stack_.back())) : void();
    case kLong4:
      return PushLong(Number<uint32_t>());
    case kBinFloat:
      return PushFloat();
    case kBinUnicode8:
      return PushText(PickleKind::kString, Number<uint64_t>());
    case kShortBinString:
      return PushText(PickleKind::kString, Number<uint8_t>());
    case kBinString:
      return PushText(PickleKind::kString, Number<uint32_t>());
    case kShortBinBytes:
      return PushText(PickleKind::kBytes, Number<uint8_t>());
    case kBinBytes:
      return PushText(PickleKind::kBytes, Number<uint32_t>());
    case kBinBytes8:
      return PushText(PickleKind::kBytes, Number<uint64_t>());
    case kByteArray8:
      PushText(PickleKind::kBytes, Number<uint64_t>());
      return error_.ok() ? Wrap(PickleName::kBytearray) : void();
    case kEmptySet:
      return PushSequence(PickleKind::kSet);
    case kAddItems:
      return AddSinceMark(PickleKind::kSet);
    case kFrozenSetOp:
      if (const auto values = SinceMark()) {
        Collect(PickleKind::kTuple, values->size());
        if (error_.ok()) Wrap(PickleName::kFrozenSet);
      }
      return;
    case kGlobal: {
      const auto module = Line();
      const auto name = module ? Line() : std::nullopt;
      if (name) PushName(*module, *name);
      return;
    }
    case kStackGlobal:
      return StackGlobal();
    case kNewObjEx:
      return MakeWithNames();
    case kBinPersId:
      return Persistent();
    default:
      break;
  }
  if (const char* name = RefusedPickleOp(op)) {
    return Fail(Unsupported(std::string("the pickle has an operation ") + name +
                            ", which is not read" + Where()));
  }
  Damaged("has an operation that there is not");
}

Result<Pickle> Pickle::Parse(ByteSpan bytes, UnknownNames unknown) {
  return PickleMachine(bytes, unknown).Run();
}

}  // namespace torch_ckpt
