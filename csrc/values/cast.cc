#include "values/cast.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "values/float_loops.h"

namespace torch_ckpt {
namespace {

const FloatImplementation& Best() { return FloatImplementations().front(); }

size_t CastBy(const FloatImplementation& implementation, Dtype from,
              const std::byte* source, Dtype to, std::byte* target,
              size_t count) {
  const auto source_bytes = static_cast<size_t>(DtypeBits(from)) / 8;
  const auto target_bytes = static_cast<size_t>(DtypeBits(to)) / 8;
  const FloatLoops in = implementation.loops(from);
  const FloatLoops out = implementation.loops(to);
  std::array<float, kFloatsAtOnce> values;
  size_t lost = 0;
  for (size_t at = 0; at < count; at += kFloatsAtOnce) {
    const size_t size = std::min(kFloatsAtOnce, count - at);
    const size_t infinite =
        in.read(source + at * source_bytes, values.data(), size);
    lost += out.write(values.data(), target + at * target_bytes, size);
    if (out.has_infinity) lost += infinite;  // else counted as too large
  }
  return lost;
}

}  // namespace

bool CanCast(Dtype from, Dtype to) {
  const FloatLoops in = Best().loops(from);  // scales are read and not written
  return in.read != nullptr && in.write != nullptr &&
         Best().loops(to).write != nullptr;
}

size_t CastElements(Dtype from, const std::byte* source, Dtype to,
                    std::byte* target, size_t count) {
  return CastBy(Best(), from, source, to, target, count);
}

Converter::Converter(std::string fqn, Dtype from, Dtype to)
    : fqn_(std::move(fqn)),
      from_(from),
      to_(to),
      unit_(static_cast<uint64_t>(DtypeUnit(from).elements)),
      from_bytes_(static_cast<uint64_t>(DtypeUnit(from).bytes)),
      to_bytes_(unit_ * static_cast<uint64_t>(DtypeBits(to)) / 8) {}

Status Converter::Check() const {
  const uint64_t lost = lost_;
  if (lost == 0) return {};
  return InvalidArgument("at least " + std::to_string(lost) + " values of " +
                         DtypeName(from_) + " would be out of range as " +
                         DtypeName(to_))
      .WithTensor(fqn_);
}

std::optional<size_t> CastElementsBy(std::string_view implementation,
                                     Dtype from, const std::byte* source,
                                     Dtype to, std::byte* target,
                                     size_t count) {
  for (const FloatImplementation& one : FloatImplementations()) {
    if (implementation == one.name) {
      return CastBy(one, from, source, to, target, count);
    }
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
