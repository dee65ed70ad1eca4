#include "plan/view.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <utility>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMostText = 4096;
constexpr int kMostDepth = 16;  // of parentheses

Status Bad(const std::string& what) { return InvalidArgument(what); }

}  // namespace

Result<int64_t> View::Number::Value(const Numbers& numbers, bool free) const {
  std::vector<int64_t> held;
  for (const Step& step : steps) {
    if (step.what == 'n') {
      held.push_back(step.value);
      continue;
    }
    if (step.what == 'p') {
      const auto found = numbers.find(step.name);
      if (found != numbers.end()) {
        held.push_back(found->second);
      } else if (free && step.name.front() == '{') {
        held.push_back(0);
      } else {
        return Bad("nothing says what " + step.name + " is");
      }
      continue;
    }
    const int64_t b = held.back();
    held.pop_back();
    int64_t& a = held.back();
    bool fits = true;
    switch (step.what) {
      case '+':
        fits = !__builtin_add_overflow(a, b, &a);
        break;
      case '-':
        fits = !__builtin_sub_overflow(a, b, &a);
        break;
      case '*':
        fits = !__builtin_mul_overflow(a, b, &a);
        break;
      default:
        fits = b > 0 && a >= 0;
        if (fits) a /= b;
    }
    if (!fits) return Bad("a number is too large, or divided by none");
  }
  return held.back();
}

class View::Parser {
 public:
  Parser(std::string_view text, View* view) : text_(text), view_(view) {}

  Status Run() {
    if (text_.size() > kMostText) return Bad("it is too long");
    if (text_ == "0") {
      view_->padding_ = true;
      return {};
    }
    TC_RETURN_IF_ERROR(ReadName());
    while (At('[')) TC_RETURN_IF_ERROR(ReadIndex());
    if (text_.substr(at_) == ".T") {
      view_->turned_ = true;
      at_ += 2;
    }
    if (at_ != text_.size()) return Unreadable();
    return {};
  }

 private:
  bool At(char c) const { return at_ < text_.size() && text_[at_] == c; }
  void Skip() {
    while (At(' ')) ++at_;
  }
  bool Take(std::string_view word) {
    Skip();
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    Skip();
    return true;
  }
  Status Unreadable() const {
    return Bad("what is meant by '" + std::string(text_.substr(at_)) + "'?");
  }

  Result<std::string> Placeholder() {
    const size_t end = text_.find('}', at_);
    if (end == std::string_view::npos || end == at_ + 1) return Unreadable();
    const std::string_view name = text_.substr(at_, end + 1 - at_);
    if (!std::all_of(name.begin() + 1, name.end() - 1, IsOfName)) {
      return Unreadable();
    }
    at_ = end + 1;
    auto& known = view_->placeholders_;
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      known.emplace_back(name);
    }
    return std::string(name);
  }
  static bool IsOfName(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  }

  // Up to an index, or ".T" at the end.
  Status ReadName() {
    const size_t index = text_.find('[');
    size_t end = std::min(index, text_.size());
    if (index == std::string_view::npos && text_.ends_with(".T")) end -= 2;
    std::string before;
    bool any = false;
    while (at_ < end) {
      if (text_[at_] == '}') return Unreadable();
      if (text_[at_] != '{') {
        before += text_[at_++];
        continue;
      }
      // Two that touch could be divided in several ways.
      if (before.empty() && any) return Unreadable();
      TC_ASSIGN_OR_RETURN(std::string name, Placeholder());
      view_->name_.push_back({std::move(before), std::move(name)});
      before.clear();
      any = true;
    }
    if (before.empty() && !any) return Bad("it has no name");
    view_->name_.push_back({std::move(before), ""});
    return {};
  }

  Status ReadIndex() {
    Take("[");
    std::vector<Item> items;
    do {
      TC_ASSIGN_OR_RETURN(Item item, ReadItem());
      items.push_back(std::move(item));
    } while (Take(","));
    if (!At(']')) return Unreadable();
    ++at_;  // and no space: ".T" follows right behind it
    view_->indexes_.push_back(std::move(items));
    return {};
  }

  Result<Item> ReadItem() {
    Item item;
    Skip();
    if (!At(':')) {
      TC_ASSIGN_OR_RETURN(item.first, ReadNumber());
      if (Take("::")) {
        item.kind = Item::Kind::kEvery;
        TC_ASSIGN_OR_RETURN(item.second, ReadNumber());
        return item;
      }
      if (Take("/")) {
        item.kind = Item::Kind::kPiece;
        TC_ASSIGN_OR_RETURN(item.second, ReadNumber());
        return item;
      }
      item.kind = Item::Kind::kIndex;
      if (!Take(":")) return item;
    } else {
      Take(":");
    }
    if (!At(',') && !At(']')) {
      TC_ASSIGN_OR_RETURN(item.second, ReadNumber());
    }
    const bool all = item.first.empty() && item.second.empty();
    item.kind = all ? Item::Kind::kAll : Item::Kind::kInterval;
    return item;
  }

  Result<Number> ReadNumber() {
    Number number;
    TC_RETURN_IF_ERROR(ReadSum(&number, 0));
    return number;
  }

  Status ReadSum(Number* out, int depth) {
    if (depth > kMostDepth) return Bad("it has too many parentheses");
    TC_RETURN_IF_ERROR(ReadProduct(out, depth));
    for (Skip(); At('+') || At('-'); Skip()) {
      const char what = text_[at_++];
      TC_RETURN_IF_ERROR(ReadProduct(out, depth));
      out->steps.push_back({what});
    }
    return {};
  }

  Status ReadProduct(Number* out, int depth) {
    TC_RETURN_IF_ERROR(ReadFactor(out, depth));
    for (;;) {
      Skip();
      const bool divides = text_.substr(at_).starts_with("//");
      if (!divides && !At('*')) return {};
      at_ += divides ? 2 : 1;
      TC_RETURN_IF_ERROR(ReadFactor(out, depth));
      out->steps.push_back({divides ? '/' : '*'});
    }
  }

  Status ReadFactor(Number* out, int depth) {
    Skip();
    if (Take("(")) {
      TC_RETURN_IF_ERROR(ReadSum(out, depth + 1));
      return Take(")") ? Status() : Unreadable();
    }
    if (At('{')) {
      TC_ASSIGN_OR_RETURN(std::string name, Placeholder());
      out->steps.push_back({'p', 0, std::move(name)});
      return {};
    }
    const size_t begin = at_;
    while (at_ < text_.size() && IsOfName(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) return Unreadable();
    if (std::isdigit(static_cast<unsigned char>(word[0])) == 0) {
      out->steps.push_back({'p', 0, std::string(word)});
      return {};
    }
    int64_t value = 0;
    const auto [end, error] =
        std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size()) {
      at_ = begin;
      return Unreadable();
    }
    out->steps.push_back({'n', value});
    return {};
  }

  const std::string_view text_;
  View* const view_;
  size_t at_ = 0;
};

class View::Selector {
 public:
  Selector(const Dims& shape, const Numbers& numbers, Numbers* ranges)
      : numbers_(numbers), ranges_(ranges) {
    out_.at = Dims::Filled(shape.size(), 0);
    for (int d = 0; d < shape.size(); ++d) {
      out_.axes.push_back({d, 0, 1, shape[d]});
    }
  }

  Status Index(const std::vector<Item>& items) {
    if (items.size() > out_.axes.size()) {
      return Bad("it has " + std::to_string(items.size()) + " indexes for " +
                 std::to_string(out_.axes.size()) + " dimensions");
    }
    std::vector<Selection::Axis> left;
    for (size_t i = 0; i < out_.axes.size(); ++i) {
      Selection::Axis axis = out_.axes[i];
      if (i < items.size()) {
        TC_ASSIGN_OR_RETURN(const bool stays, Take(items[i], &axis));
        if (!stays) continue;
      }
      left.push_back(axis);
    }
    out_.axes = std::move(left);
    return {};
  }

  Status Turn() {
    const size_t count = out_.axes.size();
    if (count < 2) return Bad(".T needs two dimensions");
    std::swap(out_.axes[count - 1], out_.axes[count - 2]);
    return {};
  }

  Selection TakeOut() { return std::move(out_); }

 private:
  // One of `count`, which a placeholder that is free runs over.
  Result<int64_t> OneOf(const Number& number, int64_t count) {
    const std::string* const alone = number.Alone();
    const bool free = alone != nullptr && !numbers_.contains(*alone);
    if (free) {
      const auto [at, fresh] = ranges_->try_emplace(*alone, count);
      if (!fresh && at->second != count) {
        return Bad(*alone + " runs over " + std::to_string(at->second) +
                   " and over " + std::to_string(count));
      }
    }
    TC_ASSIGN_OR_RETURN(const int64_t value, number.Value(numbers_, free));
    if ((value < 0 || value >= count) && !(free && count == 0)) {
      return Bad(std::to_string(value) + " is none of " +
                 std::to_string(count));
    }
    return value;
  }

  // Whether the axis stays one.
  Result<bool> Take(const Item& item, Selection::Axis* axis) {
    switch (item.kind) {
      case Item::Kind::kAll:
        return true;
      case Item::Kind::kIndex: {
        TC_ASSIGN_OR_RETURN(const int64_t at, OneOf(item.first, axis->count));
        out_.at[axis->dim] = axis->start + axis->step * at;
        return false;
      }
      case Item::Kind::kInterval: {
        int64_t begin = 0, end = axis->count;
        if (!item.first.empty()) {
          TC_ASSIGN_OR_RETURN(begin, item.first.Value(numbers_, false));
        }
        if (!item.second.empty()) {
          TC_ASSIGN_OR_RETURN(end, item.second.Value(numbers_, false));
        }
        if (begin < 0 || end < begin || end > axis->count) {
          return Bad(std::to_string(begin) + ":" + std::to_string(end) +
                     " is not inside of " + std::to_string(axis->count));
        }
        axis->start += axis->step * begin;
        axis->count = end - begin;
        return true;
      }
      case Item::Kind::kPiece:
      case Item::Kind::kEvery: {
        TC_ASSIGN_OR_RETURN(const int64_t pieces,
                            item.second.Value(numbers_, false));
        if (pieces < 1 || axis->count % pieces != 0) {
          return Bad(std::to_string(axis->count) + " is not divided by " +
                     std::to_string(pieces));
        }
        TC_ASSIGN_OR_RETURN(const int64_t piece, OneOf(item.first, pieces));
        if (axis->count == 0) return true;  // of nothing all pieces are alike
        axis->count /= pieces;
        if (item.kind == Item::Kind::kPiece) {
          axis->start += axis->step * piece * axis->count;
        } else {
          axis->start += axis->step * piece;
          axis->step *= pieces;
        }
        return true;
      }
    }
    return true;
  }

  const Numbers& numbers_;
  Numbers* const ranges_;
  Selection out_;
};

Result<View> View::Parse(std::string_view text) {
  View view;
  view.text_ = text;
  const Status parsed = Parser(text, &view).Run();
  if (parsed.ok()) return view;
  return Status(parsed.kind(),
                "'" + std::string(text) + "': " + parsed.message());
}

bool View::Match(std::string_view name, Numbers* numbers) const {
  if (padding_) return false;
  for (const NamePart& part : name_) {
    if (!name.starts_with(part.text)) return false;
    name.remove_prefix(part.text.size());
    if (part.placeholder.empty()) return name.empty();
    size_t digits = 0;
    while (digits < name.size() &&
           std::isdigit(static_cast<unsigned char>(name[digits])) != 0) {
      ++digits;
    }
    int64_t value = 0;
    const auto read = std::from_chars(name.data(), name.data() + digits, value);
    if (digits == 0 || read.ec != std::errc() ||
        (digits > 1 && name[0] == '0')) {
      return false;
    }
    const auto [at, fresh] = numbers->try_emplace(part.placeholder, value);
    if (!fresh && at->second != value) return false;
    name.remove_prefix(digits);
  }
  return false;
}

std::string View::Name(const Numbers& numbers) const {
  std::string name;
  for (const NamePart& part : name_) {
    name += part.text;
    if (part.placeholder.empty()) continue;
    name += std::to_string(numbers.find(part.placeholder)->second);
  }
  return name;
}

bool View::HasName(const Numbers& numbers) const {
  return std::all_of(name_.begin(), name_.end(), [&](const NamePart& part) {
    return part.placeholder.empty() || numbers.contains(part.placeholder);
  });
}

Result<Selection> View::Select(const Dims& shape, const Numbers& numbers,
                               Numbers* ranges) const {
  Selector selector(shape, numbers, ranges);
  for (const std::vector<Item>& items : indexes_) {
    TC_RETURN_IF_ERROR(selector.Index(items));
  }
  if (turned_) TC_RETURN_IF_ERROR(selector.Turn());
  return selector.TakeOut();
}

Result<int64_t> View::SizeFor(const Item& item, int64_t count,
                              const Numbers& numbers) {
  switch (item.kind) {
    case Item::Kind::kAll:
    case Item::Kind::kIndex:
      return count;
    case Item::Kind::kInterval: {
      int64_t begin = 0;
      if (!item.first.empty()) {
        TC_ASSIGN_OR_RETURN(begin, item.first.Value(numbers, false));
      }
      if (begin < 0) return Bad("an interval begins before all");
      if (begin > kMaxDimension - count) return Bad("a dimension is too large");
      return begin + count;
    }
    case Item::Kind::kPiece:
    case Item::Kind::kEvery:
      break;
  }
  TC_ASSIGN_OR_RETURN(const int64_t pieces, item.second.Value(numbers, false));
  if (pieces < 1 || count > kMaxDimension / pieces) {
    return Bad("there are not so many pieces");
  }
  return count * pieces;
}

Result<Dims> View::ShapeFor(const Selection& other,
                            const Numbers& numbers) const {
  std::vector<int64_t> counts;
  for (const Selection::Axis& axis : other.axes) counts.push_back(axis.count);
  if (turned_) {
    if (counts.size() < 2) return Bad(".T needs two dimensions");
    std::swap(counts[counts.size() - 1], counts[counts.size() - 2]);
  }
  for (auto items = indexes_.rbegin(); items != indexes_.rend(); ++items) {
    std::vector<int64_t> before;
    size_t next = 0;
    for (const Item& item : *items) {
      if (item.kind == Item::Kind::kIndex) {
        TC_ASSIGN_OR_RETURN(const int64_t at, item.first.Value(numbers, false));
        if (at < 0 || at >= kMaxDimension) return Bad("there is no such index");
        before.push_back(at + 1);
        continue;
      }
      if (next == counts.size()) {
        return Bad("it has more indexes than dimensions");
      }
      TC_ASSIGN_OR_RETURN(const int64_t size,
                          SizeFor(item, counts[next++], numbers));
      before.push_back(size);
    }
    before.insert(before.end(),
                  counts.begin() + static_cast<std::ptrdiff_t>(next),
                  counts.end());
    counts = std::move(before);
  }
  if (counts.size() > static_cast<size_t>(kMaxDims)) {
    return Bad("it has too many dimensions");
  }
  Dims shape;
  for (const int64_t count : counts) {
    if (count > kMaxDimension) return Bad("a dimension is too large");
    shape.push_back(count);
  }
  return shape;
}

}  // namespace torch_ckpt
