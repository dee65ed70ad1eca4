// Dims and Box: the geometry that the whole product is made of.
//
// A tensor has a shape; a Box is an N-d interval (offsets, sizes) of it. Both
// live inline (no allocation), since plans hold millions of them. At most
// kMaxDims dimensions of kMaxDimension; whoever reads a shape from outside
// checks that first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace torch_ckpt {

inline constexpr int kMaxDims = 8;
inline constexpr int64_t kMaxDimension = (int64_t{1} << 48) - 1;

class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> values) {
    for (int64_t v : values) push_back(v);
  }
  static Dims Filled(int n, int64_t value) {
    Dims d;
    for (int i = 0; i < n; ++i) d.push_back(value);
    return d;
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == kMaxDims; }
  // REQUIRES: !full().
  void push_back(int64_t v) { values_[static_cast<size_t>(size_++)] = v; }
  int64_t& operator[](int i) { return values_[static_cast<size_t>(i)]; }
  int64_t operator[](int i) const { return values_[static_cast<size_t>(i)]; }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return values_.data() + size_; }
  bool operator==(const Dims& o) const {
    return size_ == o.size_ && std::equal(begin(), end(), o.begin());
  }
  // Number of elements; 1 for rank 0. REQUIRES: the product fits in int64.
  int64_t Product() const {
    int64_t p = 1;
    for (int64_t v : *this) p *= v;
    return p;
  }
  std::string ToString() const {  // "(4, 2)"
    std::string s = "(";
    for (int i = 0; i < size_; ++i) {
      if (i) s += ", ";
      s += std::to_string((*this)[i]);
    }
    return s + ")";
  }

 private:
  int size_ = 0;
  std::array<int64_t, kMaxDims> values_{};
};

struct Box {
  Dims offsets;
  Dims sizes;  // same rank as offsets; a size of 0 makes the box empty

  static Box Whole(const Dims& shape) {
    return {Dims::Filled(shape.size(), 0), shape};
  }
  int rank() const { return offsets.size(); }
  int64_t Volume() const { return sizes.Product(); }
  bool Empty() const { return Volume() == 0; }
  bool operator==(const Box& o) const = default;
  std::string ToString() const {  // "[0:4, 2:3]", "[]" for a scalar
    std::string s = "[";
    for (int i = 0; i < rank(); ++i) {
      if (i) s += ", ";
      s += std::to_string(offsets[i]) + ":" +
           std::to_string(offsets[i] + sizes[i]);
    }
    return s + "]";
  }
};

// True when `box` has the rank of `shape` and lies inside it. Never overflows.
inline bool Inside(const Box& box, const Dims& shape) {
  if (box.rank() != shape.size() || box.sizes.size() != shape.size())
    return false;
  for (int d = 0; d < shape.size(); ++d) {
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.offsets[d] > shape[d] ||
        box.sizes[d] > shape[d] - box.offsets[d])
      return false;
  }
  return true;
}

}  // namespace torch_ckpt
