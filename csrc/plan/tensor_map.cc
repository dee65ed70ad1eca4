#include "plan/tensor_map.h"

#include <algorithm>
#include <utility>

#include "format/dtype.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

// Parts that a mapping makes at most: each takes some hundred bytes.
constexpr int64_t kMostParts = int64_t{1} << 22;

std::string CountsOf(const Selection& selection) {
  Dims counts;
  for (const Selection::Axis& axis : selection.axes) {
    counts.push_back(axis.count);
  }
  return counts.ToString();
}

bool HaveOneShape(const Selection& a, const Selection& b) {
  return std::equal(a.axes.begin(), a.axes.end(), b.axes.begin(), b.axes.end(),
                    [](const Selection::Axis& x, const Selection::Axis& y) {
                      return x.count == y.count;
                    });
}

int64_t ElementsOf(const Selection& selection) {
  int64_t count = 1;
  for (const Selection::Axis& axis : selection.axes) count *= axis.count;
  return count;
}

// Boxes that BoxesOf makes of it, or more than kMostParts.
int64_t BoxCountOf(const Selection& selection) {
  int64_t count = 1;
  for (const Selection::Axis& axis : selection.axes) {
    if (axis.step == 1 || axis.count == 0) continue;
    if (count > kMostParts / axis.count) return kMostParts + 1;
    count *= axis.count;
  }
  return count;
}

struct ViewPair {
  View stored, native;
  bool turned = false;
  bool matched = false;  // some tensor has its name

  std::string Text() const {
    const View& first = turned ? native : stored;
    const View& second = turned ? stored : native;
    return "('" + first.text() + "', '" + second.text() + "')";
  }
};

Result<ViewPair> ParsePair(const MappingPair& pair) {
  TC_ASSIGN_OR_RETURN(View stored, View::Parse(pair.stored));
  TC_ASSIGN_OR_RETURN(View native, View::Parse(pair.native));
  return ViewPair{std::move(stored), std::move(native), pair.turned};
}

Result<std::vector<ViewPair>> ParseAll(const std::vector<MappingPair>& pairs) {
  std::vector<ViewPair> parsed;
  for (const MappingPair& pair : pairs) {
    TC_ASSIGN_OR_RETURN(ViewPair each, ParsePair(pair));
    parsed.push_back(std::move(each));
  }
  return parsed;
}

// A native tensor's part of a stored one. `native` is past all for what a pair
// says that nobody has.
struct Use {
  size_t native;
  Selection taken;
};

class Mapper {
 public:
  // `stored`: null where stored tensors are to be made.
  Mapper(const std::vector<NativeTensor>& natives, const Numbers& numbers,
         const StoredShapes* stored)
      : natives_(natives), numbers_(numbers), stored_(stored) {}

  Result<TensorMap> Run(const std::vector<MappingPair>& pairs) {
    TC_ASSIGN_OR_RETURN(pairs_, ParseAll(pairs));
    if (stored_ == nullptr) TC_RETURN_IF_ERROR(MakeShapes());
    for (size_t n = 0; n < natives_.size(); ++n) {
      TC_RETURN_IF_ERROR(Map(n).WithTensor(natives_[n].name));
    }
    TC_RETURN_IF_ERROR(TakeUnused());
    if (stored_ != nullptr) TC_RETURN_IF_ERROR(CheckLeftOut());
    TC_RETURN_IF_ERROR(CheckStored());
    for (size_t p = 0; p < pairs_.size(); ++p) {
      if (!pairs_[p].matched) out_.unmatched.push_back(p);
    }
    return std::move(out_);
  }

 private:
  const StoredShapes& shapes() const { return stored_ ? *stored_ : made_; }

  // The shape of the tensor of this name.
  Result<Dims> ShapeOf(const std::string& name) const {
    const auto found = shapes().find(name);
    if (found != shapes().end()) return found->second;
    return InvalidArgument("'" + name + "' is no tensor of the checkpoint");
  }

  // Calls fn(native, numbers) for every combination of what a pair's names do
  // not bind, of every native tensor that it means.
  template <class Fn>
  Status ForEach(size_t n, const ViewPair& pair, const Fn& fn) {
    Numbers bound = numbers_;
    if (!pair.native.Match(natives_[n].name, &bound)) return {};
    Status done = ForEachBound(n, pair, bound, fn);
    if (done.ok()) return {};
    return Status(done.kind(), "pair " + pair.Text() + ": " + done.message());
  }

  template <class Fn>
  Status ForEachBound(size_t n, const ViewPair& pair, const Numbers& bound,
                      const Fn& fn) {
    Numbers ranges;
    TC_RETURN_IF_ERROR(
        pair.native.Select(natives_[n].shape, bound, &ranges).status());
    if (!pair.stored.is_padding()) {
      Numbers first = bound;
      for (const auto& [name, count] : ranges) first.emplace(name, 0);
      if (!pair.stored.HasName(first)) {
        return InvalidArgument("a placeholder is in the stored name alone");
      }
      if (stored_ != nullptr) {
        TC_ASSIGN_OR_RETURN(const Dims shape, ShapeOf(pair.stored.Name(first)));
        TC_RETURN_IF_ERROR(pair.stored.Select(shape, bound, &ranges).status());
      }
    }
    const std::vector<std::pair<std::string, int64_t>> free(ranges.begin(),
                                                            ranges.end());
    int64_t count = 1;
    for (const auto& [name, range] : free) {
      if (range > 0 && count > kMostParts / range) {
        return Exhausted("it has too many parts");
      }
      count *= range;
    }
    parts_ += count;
    if (parts_ > 2 * kMostParts) return Exhausted("there are too many parts");
    Numbers numbers = bound;
    for (const auto& [name, range] : free) numbers[name] = 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i;
      for (auto at = free.rbegin(); at != free.rend(); ++at) {
        numbers[at->first] = rest % at->second;
        rest /= at->second;
      }
      TC_RETURN_IF_ERROR(fn(numbers));
    }
    return {};
  }

  // The smallest that have what pairs say.
  Status MakeShapes() {
    for (const ViewPair& pair : pairs_) {
      if (pair.native.is_padding()) {
        return InvalidArgument("pair " + pair.Text() +
                               ": nothing says what is stored there");
      }
      for (size_t n = 0; n < natives_.size(); ++n) {
        if (pair.stored.is_padding()) continue;
        const Status made = ForEach(n, pair, [&](const Numbers& numbers) {
          return Enlarge(n, pair, numbers);
        });
        TC_RETURN_IF_ERROR(Status(made).WithTensor(natives_[n].name));
      }
    }
    return {};
  }

  Status Enlarge(size_t n, const ViewPair& pair, const Numbers& numbers) {
    Numbers none;
    TC_ASSIGN_OR_RETURN(const Selection from,
                        pair.native.Select(natives_[n].shape, numbers, &none));
    TC_ASSIGN_OR_RETURN(const Dims least, pair.stored.ShapeFor(from, numbers));
    const auto [at, fresh] =
        made_.try_emplace(pair.stored.Name(numbers), least);
    if (at->second.size() != least.size()) {
      return InvalidArgument(
          "'" + at->first + "' has " + std::to_string(least.size()) +
          " dimensions, and " + std::to_string(at->second.size()) +
          " in another pair");
    }
    for (int d = 0; d < least.size(); ++d) {
      at->second[d] = std::max(at->second[d], least[d]);
    }
    // As many elements as can be counted.
    return ByteSize(Dtype::kF64, at->second).status();
  }

  Status Map(size_t n) {
    const NativeTensor& native = natives_[n];
    std::vector<MappedPart> parts;
    bool any = false;
    for (ViewPair& pair : pairs_) {
      Numbers numbers = numbers_;
      const bool matches = pair.native.Match(native.name, &numbers);
      pair.matched = pair.matched || matches;
      any = any || matches;
      TC_RETURN_IF_ERROR(ForEach(n, pair, [&](const Numbers& each) {
        return Add(n, pair, each, &parts);
      }));
    }
    if (!any) return {};
    std::vector<Box> boxes;
    for (const MappedPart& part : parts) {
      for (Box& box : BoxesOf(part.pair.from)) boxes.push_back(std::move(box));
    }
    const Status covered = ProveTiling(Box::Whole(native.shape), boxes);
    if (!covered.ok()) {
      return InvalidArgument(
          "the pairs of tensor_mapping do not have each element of " +
          native.shape.ToString() + " once: " + covered.message());
    }
    out_.natives[n] = std::move(parts);
    return {};
  }

  Status Add(size_t n, const ViewPair& pair, const Numbers& numbers,
             std::vector<MappedPart>* parts) {
    Numbers none;
    MappedPart part;
    TC_ASSIGN_OR_RETURN(part.pair.from,
                        pair.native.Select(natives_[n].shape, numbers, &none));
    if (pair.stored.is_padding()) {
      boxes_ += BoxCountOf(part.pair.from);
      if (boxes_ > kMostParts) return Exhausted("it has too many parts");
      part.pair.to = part.pair.from;
      parts->push_back(std::move(part));
      return {};
    }
    part.stored = pair.stored.Name(numbers);
    TC_ASSIGN_OR_RETURN(const Dims shape, ShapeOf(part.stored));
    TC_ASSIGN_OR_RETURN(part.pair.to,
                        pair.stored.Select(shape, numbers, &none));
    if (!HaveOneShape(part.pair.from, part.pair.to)) {
      return InvalidArgument(
          "has the shape " + CountsOf(part.pair.to) + " in '" + part.stored +
          "' of " + shape.ToString() + ", and " + CountsOf(part.pair.from) +
          " in " + natives_[n].shape.ToString());
    }
    // Steps make a box for each index.
    boxes_ += BoxCountOf(part.pair.from) + BoxCountOf(part.pair.to);
    if (boxes_ > kMostParts) return Exhausted("it has too many parts");
    uses_[part.stored].push_back({n, part.pair.to});
    parts->push_back(std::move(part));
    return {};
  }

  // Of stored tensors what pairs say that nobody has.
  Status TakeUnused() {
    for (ViewPair& pair : pairs_) {
      if (!pair.native.is_padding()) continue;
      for (const auto& [name, shape] : shapes()) {
        Numbers numbers = numbers_;
        if (!pair.stored.Match(name, &numbers)) continue;
        pair.matched = true;
        Numbers ranges;
        Result<Selection> taken = pair.stored.Select(shape, numbers, &ranges);
        if (!taken.ok() || !ranges.empty()) {
          return InvalidArgument("pair " + pair.Text() + ": " +
                                 (taken.ok() ? "a placeholder stands for all"
                                             : taken.status().message()))
              .WithTensor(name);
        }
        boxes_ += BoxCountOf(*taken);
        if (boxes_ > kMostParts) return Exhausted("there are too many parts");
        uses_[name].push_back({natives_.size(), std::move(*taken)});
      }
    }
    return {};
  }

  // No stored tensor is left out of which all native ones are there that pairs
  // give it to: a third expert, of which a group has two.
  Status CheckLeftOut() const {
    std::map<std::string_view, const NativeTensor*> natives;
    for (const NativeTensor& each : natives_) natives[each.name] = &each;
    for (const auto& [name, shape] : shapes()) {
      if (uses_.contains(name) || shape.Product() == 0) continue;
      const ViewPair* of = nullptr;
      const NativeTensor* last = nullptr;
      bool all = true;
      for (const ViewPair& pair : pairs_) {
        Numbers bound;
        if (!pair.stored.Match(name, &bound)) continue;
        const auto native = pair.native.HasName(bound)
                                ? natives.find(pair.native.Name(bound))
                                : natives.end();
        all = all && native != natives.end();
        if (!all) break;
        of = &pair;
        last = native->second;
      }
      if (of == nullptr || !all) continue;
      return InvalidArgument("pair " + of->Text() + ": '" + last->name +
                             "' of " + last->shape.ToString() +
                             " has no place for it")
          .WithTensor(name);
    }
    return {};
  }

  // No element is in two native tensors; who has which, where some are in none.
  Status CheckStored() {
    for (const auto& [name, uses] : uses_) {
      const Dims& shape = shapes().find(name)->second;
      out_.stored[name] = shape;
      int64_t total = 0;
      for (const Use& use : uses) total += ElementsOf(use.taken);
      const int64_t whole = Box::Whole(shape).Volume();
      if (uses.size() > 1) {
        std::vector<Box> boxes;
        for (const Use& use : uses) {
          for (Box& box : BoxesOf(use.taken)) boxes.push_back(std::move(box));
        }
        const Status apart = ProveDisjoint(boxes);
        if (!apart.ok()) {
          return InvalidArgument(
                     "the pairs of tensor_mapping have elements of it twice: " +
                     apart.message())
              .WithTensor(name);
        }
      }
      if (total == whole) continue;
      if (stored_ == nullptr) {
        return InvalidArgument(
                   "the pairs of tensor_mapping have " + std::to_string(total) +
                   " elements of it, which would be " + shape.ToString())
            .WithTensor(name);
      }
      for (const Use& use : uses) {
        out_.partly.push_back(
            {name,
             use.native < natives_.size() ? natives_[use.native].name : "",
             ElementsOf(use.taken), whole});
      }
    }
    return {};
  }

  const std::vector<NativeTensor>& natives_;
  const Numbers& numbers_;
  const StoredShapes* const stored_;
  StoredShapes made_;
  std::vector<ViewPair> pairs_;
  std::map<std::string, std::vector<Use>, std::less<>> uses_;
  int64_t parts_ = 0, boxes_ = 0;
  TensorMap out_;
};

// Whether a pair's view of that side means a name.
bool MeansName(const std::vector<ViewPair>& pairs, View ViewPair::* side,
               const std::string& name) {
  return std::any_of(pairs.begin(), pairs.end(), [&](const ViewPair& pair) {
    Numbers numbers;
    return (pair.*side).Match(name, &numbers);
  });
}

}  // namespace

Result<std::vector<NamedByPair>> NamedByPairs(
    const std::vector<MappingPair>& pairs,
    const std::vector<std::string>& names) {
  TC_ASSIGN_OR_RETURN(const std::vector<ViewPair> parsed, ParseAll(pairs));
  std::vector<NamedByPair> out;
  for (size_t n = 0; n < names.size(); ++n) {
    for (size_t p = 0; p < parsed.size(); ++p) {
      Numbers bound;
      if (!parsed[p].stored.Match(names[n], &bound)) continue;
      const View& native = parsed[p].native;
      const bool is_said = !native.is_padding() && native.HasName(bound);
      out.push_back({n, p, is_said ? native.Name(bound) : ""});
    }
  }
  return out;
}

Result<std::vector<MappingPair>> TurnedFor(
    const std::vector<MappingPair>& pairs,
    const std::vector<std::string>& names) {
  TC_ASSIGN_OR_RETURN(const std::vector<ViewPair> parsed, ParseAll(pairs));
  const std::string* of_stored = nullptr;
  const std::string* of_native = nullptr;
  for (const std::string& name : names) {
    const bool stored = MeansName(parsed, &ViewPair::stored, name);
    const bool native = MeansName(parsed, &ViewPair::native, name);
    if (stored && !native) of_stored = &name;
    if (native && !stored) of_native = &name;
  }
  if (of_stored != nullptr && of_native != nullptr) {
    return InvalidArgument(
        "the first views of tensor_mapping have the name '" + *of_stored +
        "', the second ones '" + *of_native +
        "', and the checkpoint has both: which are to be made is not said");
  }
  std::vector<MappingPair> out = pairs;
  if (of_native != nullptr) return out;
  for (MappingPair& pair : out) {
    std::swap(pair.stored, pair.native);
    pair.turned = !pair.turned;
  }
  return out;
}

Result<TensorMap> MapTensors(const std::vector<MappingPair>& pairs,
                             const std::vector<NativeTensor>& natives,
                             const Numbers& numbers,
                             const StoredShapes& stored) {
  return Mapper(natives, numbers, &stored).Run(pairs);
}

Result<TensorMap> MapOntoNew(const std::vector<MappingPair>& pairs,
                             const std::vector<NativeTensor>& natives,
                             const Numbers& numbers) {
  return Mapper(natives, numbers, nullptr).Run(pairs);
}

}  // namespace torch_ckpt
