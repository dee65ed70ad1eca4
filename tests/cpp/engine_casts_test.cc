// Things of other providers, cast, in whatever pieces an output asks for them.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/write/casts.h"
#include "engine/write/fill.h"
#include "engine/write/memory_providers.h"
#include "engine_test_util.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

// Bytes of `floats` as elements of `to`, made in pieces that end at `cuts`.
std::string MadeInPieces(const std::vector<float>& floats, Dtype to,
                         bool strided, const std::vector<uint64_t>& cuts,
                         Status* checked) {
  const auto count = static_cast<int64_t>(floats.size());
  // Strided: every other one of twice as many.
  std::vector<float> memory(floats.size() * 2);
  for (size_t i = 0; i < floats.size(); ++i) {
    memory[strided ? 2 * i : i] = floats[i];
  }
  SourceTensor source;
  source.data = reinterpret_cast<const std::byte*>(memory.data());
  source.sizes = {count};
  source.strides = {strided ? 8 : 4};
  source.element_bytes = 4;
  const std::vector<SourceTensor> sources = {source};
  HostMemory host(sources);
  Casts casts;
  const Origin origin = casts.Add({&host, 0}, Dtype::kF32, to, "w");
  std::string out(floats.size() * static_cast<size_t>(DtypeBits(to)) / 8, '\0');
  std::vector<std::byte> scratch(casts.ScratchBytes());
  uint64_t from = 0;
  for (const uint64_t until : cuts) {
    FillBuffer buffer(
        {reinterpret_cast<std::byte*>(out.data()) + from, until - from}, from,
        0, FillBuffer::Copies::kCached);
    EXPECT_OK(
        casts.Fill({{origin.index, from, until - from, 0}}, scratch, &buffer));
    from = until;
  }
  *checked = casts.Check();
  return out;
}

TEST(Casts, PiecesThatCutElementsAreWholeAndCountOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<float> floats(1 + random() % 3000);
    for (float& value : floats) value = static_cast<float>(random() % 60000);
    const size_t lost = std::min<size_t>(floats.size(), random() % 4);
    for (size_t i = 0; i < lost; ++i) floats[i * floats.size() / lost] = 1e9F;
    std::string wanted(floats.size() * 2, '\0');
    CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(floats.data()),
                 Dtype::kF16, reinterpret_cast<std::byte*>(wanted.data()),
                 floats.size());
    std::vector<uint64_t> cuts;
    for (uint64_t at = 0; at < wanted.size();) {
      at = std::min<uint64_t>(wanted.size(), at + 1 + random() % 700);
      cuts.push_back(at);
    }
    Status checked;
    EXPECT_EQ(MadeInPieces(floats, Dtype::kF16, round % 2 == 0, cuts, &checked),
              wanted);
    EXPECT_EQ(checked.ok(), lost == 0);
    if (lost == 0) continue;
    EXPECT_EQ(checked.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(checked.tensor(), "w");
    EXPECT_EQ(checked.message(), "at least " + std::to_string(lost) +
                                     " values of F32 would be out of range as "
                                     "F16");
  }
}

}  // namespace
}  // namespace torch_ckpt
