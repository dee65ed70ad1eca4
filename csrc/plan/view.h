// The language of views: which elements of which tensor, as text.
//
//   view   = name index* [".T"], or "0": no elements of anything
//   index  = "[" item ("," item)* "]"
//   item   = ":" | number | [number] ":" [number] | number "/" number
//          | number "::" number
//   number = sums, differences, products and // of integers, {placeholders} and
//            names of numbers
//
// As numpy's, where several indexes in a row act one after the other. "k/n" is
// piece k of n equal ones, "k::n" every n-th index from k on; ".T" turns the
// last two dimensions. docs/tensor_mapping.md has examples.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "plan/box_map.h"

namespace torch_ckpt {

// Placeholders, with their braces, and names of numbers.
using Numbers = std::map<std::string, int64_t, std::less<>>;

class View {
 public:
  // kInvalidArgument says what cannot be read, and where.
  static Result<View> Parse(std::string_view text);

  bool is_padding() const { return padding_; }
  const std::string& text() const { return text_; }
  // "{i}", of the name and of the indexes, each once.
  const std::vector<std::string>& placeholders() const { return placeholders_; }

  // Whether `name` is one of those that it means; adds what placeholders in it
  // are then: numbers without leading zeros.
  bool Match(std::string_view name, Numbers* numbers) const;
  // REQUIRES: `numbers` has all placeholders of the name.
  std::string Name(const Numbers& numbers) const;
  // Whether `numbers` has these.
  bool HasName(const Numbers& numbers) const;

  // What it takes of a tensor of `shape`. A placeholder that `numbers` lacks
  // counts as 0, and `ranges` has then how many it may be: as many as the
  // dimension that it is an index of, or as the pieces that it is one of. It
  // must be in such a place by itself. kInvalidArgument for what is outside, or
  // does not divide.
  Result<Selection> Select(const Dims& shape, const Numbers& numbers,
                           Numbers* ranges) const;
  // The smallest shape of which it takes as many indices as `other` does of its
  // tensor. REQUIRES: `numbers` has all placeholders.
  Result<Dims> ShapeFor(const Selection& other, const Numbers& numbers) const;

 private:
  // In postfix order.
  struct Number {
    struct Step {
      char what;  // 'n': a number, 'p': a name, or an operator; '/' is //
      int64_t value = 0;
      std::string name{};
    };

    bool empty() const { return steps.empty(); }
    // The placeholder that is all of it.
    const std::string* Alone() const {
      const bool alone = steps.size() == 1 && steps[0].what == 'p' &&
                         steps[0].name.front() == '{';
      return alone ? &steps[0].name : nullptr;
    }
    // A placeholder that `numbers` lacks is 0 where `free` says so.
    Result<int64_t> Value(const Numbers& numbers, bool free) const;

    std::vector<Step> steps;
  };
  struct Item {
    enum class Kind { kAll, kIndex, kInterval, kPiece, kEvery };
    Kind kind = Kind::kAll;
    Number first, second;  // empty ones of an interval are its ends
  };
  struct NamePart {
    std::string text;         // before the placeholder
    std::string placeholder;  // empty at the end
  };
  class Parser;
  class Selector;

  // Of a dimension that an item leaves with `count` indices.
  static Result<int64_t> SizeFor(const Item& item, int64_t count,
                                 const Numbers& numbers);

  std::string text_;
  bool padding_ = false;
  bool turned_ = false;
  std::vector<NamePart> name_;
  std::vector<std::vector<Item>> indexes_;
  std::vector<std::string> placeholders_;
};

}  // namespace torch_ckpt
