// The stack machine that reads pickles (pickle.h).
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/budget.h"
#include "format/torch/pickle.h"
#include "format/torch/pickle_arena.h"
#include "format/torch/pickle_ops.h"

namespace torch_ckpt {
namespace {

// What is remembered together, and how much one byte can recall.
constexpr size_t kMemoBlock = 64;
constexpr size_t kShortIndexes = 256;

// Of a name, beside its dtype.
constexpr int64_t kMakesObjects = 0x100;

// For messages: of a name in the pickle, which may be any text.
std::string Short(std::string_view name) {
  constexpr size_t kMost = 200;
  std::string out(name.substr(0, kMost));
  for (char& c : out) {
    if (c < 0x20 || c == 0x7f) c = '?';  // nor what is no ASCII
  }
  return out + (name.size() > kMost ? "..." : "");
}

}  // namespace

class PickleMachine {
 public:
  PickleMachine(ByteSpan bytes, UnknownNames unknown)
      : unknown_(unknown),
        begin_(AsText(bytes).data()),
        at_(begin_),
        end_(begin_ + bytes.size()),
        arena_(std::make_shared<PickleArena>(MostKept(bytes))),
        memo_arena_(MostKept(bytes)) {}

  Result<Pickle> Run() {
    if (end_ - at_ < 2 || static_cast<PickleOp>(*at_) != PickleOp::kProto) {
      return Corrupt("is no pickle of protocol 2 or newer");
    }
    FindRecalled();
    while (error_.ok() && !stopped_) Step();
    if (!error_.ok()) return error_;
    Pickle out;
    out.arena_ = std::move(arena_);
    out.root_ = stack_.back();
    out.bytes_ = static_cast<size_t>(at_ - begin_);
    return out;
  }

 private:
  static size_t MostKept(ByteSpan bytes) {
    return Budget::MostKept(bytes.size());
  }

  // --- errors; the first is kept, and ends the run ---

  std::string Where() const {
    return " (byte " + std::to_string(at_ - begin_) + " of the pickle)";
  }
  // Cold, so that operations which can fail need not keep a text ready.
  [[gnu::cold, gnu::noinline]] void Fail(Status status) {
    if (error_.ok()) error_ = std::move(status);
  }
  [[gnu::cold, gnu::noinline]] void Damaged(const char* what) {
    Fail(Corrupt(what + Where()));
  }
  [[gnu::cold, gnu::noinline]] void Full() {
    const auto size = static_cast<size_t>(end_ - begin_);
    Fail(Exhausted("the pickle makes more than fits into " +
                   std::to_string(Budget::MostKept(size) >> 20) + " MiB" +
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
  void PushInt(int64_t number) {
    const PickleValue value(PickleKind::kInt, {}, number);
    if (value.Payload() == number) return Push(value);
    int64_t* kept = arena_->New<int64_t>(1);
    if (!kept) return Full();
    *kept = number;
    Push(PickleValue::Long(kept));
  }
  // The operation, whose text is behind it.
  void PushText(PickleKind kind, std::optional<uint64_t> size) {
    if (!size) return;
    if (*size > UINT32_MAX) return Damaged("has a text above 4 GiB");
    if (Take(*size)) Push(PickleValue(kind, {}, op_));
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
    if (Take(sizeof(double))) Push(PickleValue(PickleKind::kFloat, {}, op_));
  }

  // --- tuples and what grows ---

  // The top `count` values become one.
  void Collect(PickleKind kind, size_t count, PickleName name = {}) {
    PickleValue* items = nullptr;
    if (count > 0) {
      items = arena_->New<PickleValue>(1 + count);
      if (!items) return Full();
      *items = PickleValue(PickleKind::kInt, {}, static_cast<int64_t>(count));
      std::copy(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end(),
                items + 1);
    }
    Drop(count);
    Push(PickleValue(kind, name, items));
  }
  // Null, and an error, where there is no memory.
  PickleSequence* NewSequence() {
    PickleSequence* made = arena_->New<PickleSequence>(1);
    if (made) {
      *made = {};
    } else {
      Full();
    }
    return made;
  }
  void PushSequence(PickleKind kind) {
    if (PickleSequence* made = NewSequence()) {
      Push(PickleValue(kind, {}, made));
    }
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
    if (value.Is(kind)) return value.At<PickleSequence>();
    if (value.Is(PickleKind::kObject)) {
      const PickleName name = value.name();
      const bool takes =
          name == PickleName::kUnknown ||
          (kind == PickleKind::kDict
               ? name == PickleName::kOrderedDict ||
                     name == PickleName::kDefaultDict
               : kind == PickleKind::kList && name == PickleName::kDeque);
      if (takes) return ItemsOfObject(value.At<PickleObject>(), kind);
    }
    Fail(Corrupt(std::string("adds the items of a ") + PickleKindName(kind) +
                 " to a " + PickleKindName(value.kind()) + Where()));
    return nullptr;
  }
  // Nobody reads those of an object that is not known, to which both kinds go.
  PickleSequence* ItemsOfObject(PickleObject* object, PickleKind kind) {
    if (object->items.Is(PickleKind::kNone)) {
      PickleSequence* made = NewSequence();
      if (!made) return nullptr;
      object->items = PickleValue(kind, {}, made);
    }
    return object->items.At<PickleSequence>();
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
    Push(PickleValue(PickleKind::kName, info->name,
                     static_cast<int64_t>(info->dtype) |
                         (info->is_object ? kMakesObjects : 0)));
  }
  void PushUnknownName(const std::string& name) {
    if (unknown_ == UnknownNames::kRefuse) {
      Status refused = RefuseUnknownName(name);
      return Fail(Unsupported(refused.message() + Where()));
    }
    const size_t words =
        RoundUp(name.size(), sizeof(PickleValue)) / sizeof(PickleValue);
    PickleValue* kept = arena_->New<PickleValue>(1 + words);
    if (!kept) return Full();
    *kept =
        PickleValue(PickleKind::kInt, {}, static_cast<int64_t>(name.size()));
    std::memcpy(kept + 1, name.data(), name.size());
    Push(PickleValue(PickleKind::kName, PickleName::kUnknown, kept));
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
    if (!(name.Payload() & kMakesObjects)) {
      Drop(2);
      return Push(PickleValue(PickleKind::kMade, name.name(),
                              arguments.At<PickleValue>()));
    }
    Drop(1);
    MakeObject(name.name(), arguments);
  }
  // The top becomes an object.
  void MakeObject(PickleName name, PickleValue arguments) {
    PickleObject* made = arena_->New<PickleObject>(1);
    if (!made) return Full();
    *made = {.arguments = arguments, .state = {}, .items = {}};
    stack_.back() = PickleValue(PickleKind::kObject, name, made);
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
    MakeObject(PickleName::kUnknown, stack_.back());
  }
  // The top becomes what `name` makes of it.
  void Wrap(PickleName name) { Collect(PickleKind::kMade, 1, name); }
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
                              PickleKindName(target.kind()) + Where()));
    }
    PickleValue* const before = &target.At<PickleObject>()->state;
    if (!before->Is(PickleKind::kNone) &&
        target.name() != PickleName::kUnknown) {
      return Damaged("sets a state twice");
    }
    *before = state;
    Drop(1);
  }
  void Persistent() {
    if (!Has(1)) return;
    Collect(PickleKind::kPersistent, 1);
  }

  // --- the memo ---

  // Pickles remember nearly all that they make, and recall little of it. Sees
  // which blocks of the memo are needed, and maybe some more: a recall from
  // above the first ones is these five bytes, whatever stands around them.
  void FindRecalled() {
    needed_.resize(static_cast<size_t>(end_ - begin_) / kMemoBlock + 1);
    std::fill_n(needed_.begin(),
                std::min(needed_.size(), kShortIndexes / kMemoBlock), true);
    for (const char* at = begin_;; ++at) {
      at = static_cast<const char*>(
          std::memchr(at, static_cast<int>(PickleOp::kLongBinGet),
                      static_cast<size_t>(end_ - at)));
      if (!at || static_cast<size_t>(end_ - at) <= sizeof(uint32_t)) return;
      const size_t block = Load<uint32_t>(at + 1) / kMemoBlock;
      if (block < needed_.size()) needed_[block] = true;
    }
  }
  // Picklers count what they remember: an index is the next one, or one that
  // was there.
  void Put(std::optional<uint64_t> index) {
    if (!index || !Has(1)) return;
    if (*index > remembered_) return Damaged("remembers out of order");
    if (*index == remembered_) {
      if (*index % kMemoBlock == 0 && !AddMemoBlock()) return;
      ++remembered_;
    }
    if (PickleValue* block = memo_[*index / kMemoBlock]) {
      block[*index % kMemoBlock] = stack_.back();
    }
  }
  bool AddMemoBlock() {
    PickleValue* block = nullptr;
    if (needed_[memo_.size()]) {
      block = memo_arena_.New<PickleValue>(kMemoBlock);
      if (!block) Full();
    }
    memo_.push_back(block);
    return error_.ok();
  }
  void Get(std::optional<uint32_t> index) {
    if (!index) return;
    if (*index >= remembered_) {
      return Damaged("recalls what was not remembered");
    }
    Push(memo_[*index / kMemoBlock][*index % kMemoBlock]);
  }

  void Step();
  void Rarely(uint8_t op);

  const UnknownNames unknown_;
  const char* const begin_;
  const char* at_;
  const char* const end_;
  const char* op_ = nullptr;  // the operation that runs
  std::shared_ptr<PickleArena> arena_;
  std::vector<PickleValue> stack_;
  PickleArena memo_arena_;          // goes when the pickle is read
  std::vector<bool> needed_;        // of the memo's blocks
  std::vector<PickleValue*> memo_;  // null: not needed
  uint64_t remembered_ = 0;
  std::vector<size_t> marks_;  // heights of the stack
  bool stopped_ = false;
  Status error_;
};

// The operations that large pickles consist of.
void PickleMachine::Step() {
  op_ = Take(1);
  if (!op_) return;
  const auto op = static_cast<uint8_t>(*op_);
  using enum PickleOp;
  // Every third one, or so: a branch of its own is foretold better.
  if (static_cast<PickleOp>(op) == kMemoize) return Put(remembered_);
  switch (static_cast<PickleOp>(op)) {
    case kMark:
      return marks_.push_back(stack_.size());
    case kNoneOp:
      return Push(PickleValue());
    case kNewTrue:
      return Push(PickleValue(PickleKind::kBool, {}, int64_t{1}));
    case kNewFalse:
      return Push(PickleValue(PickleKind::kBool, {}, int64_t{0}));
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
