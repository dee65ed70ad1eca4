// Bytes that are the same wherever they come from: texts, and zeros.
#pragma once

#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "engine/write/extents.h"
#include "engine/write/provider.h"

namespace torch_ckpt {

// Headers of files. Texts are added before anybody fills.
class Texts final : public Provider {
 public:
  // Puts a text at the end of a list, and keeps it: what is returned.
  std::string_view Append(std::string text, ExtentList* list) {
    list->Append({this, texts_.size()}, text.size());
    return texts_.emplace_back(std::move(text));
  }

  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan,
              FillBuffer* buffer) override {
    for (const Stretch& stretch : stretches) {
      buffer->Copy(
          stretch.at,
          AsBytes(texts_[stretch.index]).subspan(stretch.from, stretch.bytes));
    }
    return {};
  }

 private:
  std::deque<std::string> texts_;
};

// One thing, as long as anybody wants.
class Zeros final : public Provider {
 public:
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan,
              FillBuffer* buffer) override {
    for (const Stretch& stretch : stretches) {
      const MutableByteSpan out = buffer->Out(stretch.at, stretch.bytes);
      std::memset(out.data(), 0, out.size());
      buffer->Filled(out.size());
    }
    return {};
  }
};

}  // namespace torch_ckpt
