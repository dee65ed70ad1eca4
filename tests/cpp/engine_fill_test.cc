#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "engine/write/fill.h"
#include "engine/write/literals.h"

namespace torch_ckpt {
namespace {

// Makes less than it is asked for, as a wrong plan of runs would.
class Short final : public Provider {
 public:
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan,
              FillBuffer* buffer) override {
    for (const Stretch& stretch : stretches) {
      buffer->Copy(stretch.at, ByteSpan(from_).first(stretch.bytes - 1));
    }
    return {};
  }

 private:
  std::vector<std::byte> from_ = std::vector<std::byte>(64);
};

Status FillWith(Provider* provider) {
  ExtentList list;
  list.Append({provider, 0}, 16);
  list.Append({provider, 0}, 8);
  std::vector<std::byte> bytes(24);
  FillBuffer buffer(bytes, 0, 0, FillBuffer::Copies::kCached);
  return FillStretches(StretchesByProvider(list, 0, 24), {}, &buffer);
}

TEST(FillTest, WhatAProviderLeavesOutIsAnError) {
  Short provider;
  const Status status = FillWith(&provider);
  EXPECT_EQ(status.kind(), ErrorKind::kInternal);
  EXPECT_NE(status.ToString().find("22 of 24 bytes"), std::string::npos)
      << status.ToString();
}

TEST(FillTest, WhatIsWholeIsNone) {
  Zeros provider;
  EXPECT_TRUE(FillWith(&provider).ok());
}

}  // namespace
}  // namespace torch_ckpt
