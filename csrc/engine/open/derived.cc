#include "engine/open/derived.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "engine/open/checkpoint.h"
#include "format/ours/catalog_builder.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

// Parts that a mapping makes at most.
constexpr int64_t kMostParts = int64_t{1} << 24;

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

struct ViewPair {
  View stored, native;

  std::string Text() const {
    return "('" + stored.text() + "', '" + native.text() + "')";
  }
};

// A native tensor's part of a stored one.
struct Use {
  size_t native;
  Selection taken;
};

class Mapper {
 public:
  Mapper(const Checkpoint& checkpoint, const std::vector<NativeTensor>& natives,
         const Numbers& numbers)
      : checkpoint_(checkpoint), natives_(natives), numbers_(numbers) {}

  Result<MappedCatalog> Run(const std::vector<MappingPair>& pairs) {
    for (const MappingPair& pair : pairs) {
      TC_ASSIGN_OR_RETURN(View stored, View::Parse(pair.stored));
      TC_ASSIGN_OR_RETURN(View native, View::Parse(pair.native));
      pairs_.push_back({std::move(stored), std::move(native)});
    }
    for (size_t n = 0; n < natives_.size(); ++n) {
      TC_RETURN_IF_ERROR(Derive(n).WithTensor(natives_[n].name));
    }
    TC_RETURN_IF_ERROR(TakeUnused());
    TC_RETURN_IF_ERROR(CheckStored());
    TC_RETURN_IF_ERROR(Build());
    return std::move(out_);
  }

 private:
  const Catalog& catalog() const { return checkpoint_.catalog(); }
  const CatalogEntry& entry(uint32_t e) const { return catalog().entries()[e]; }

  // The tensor of this name; its error says who asks for it.
  Result<uint32_t> FindStored(const std::string& name,
                              const ViewPair& pair) const {
    const int64_t found = catalog().Find(name);
    if (found >= 0 &&
        entry(static_cast<uint32_t>(found)).kind != EntryKind::kObject) {
      return static_cast<uint32_t>(found);
    }
    return InvalidArgument("'" + name + "' of the pair " + pair.Text() +
                           " is no tensor of the checkpoint");
  }

  Status Derive(size_t n) {
    const NativeTensor& native = natives_[n];
    DerivedTensor derived;
    bool any = false;
    for (const ViewPair& pair : pairs_) {
      Numbers numbers = numbers_;
      if (!pair.native.Match(native.name, &numbers)) continue;
      any = true;
      Status expanded = Expand(n, pair, numbers, &derived);
      if (!expanded.ok()) {
        return Status(expanded.kind(),
                      "pair " + pair.Text() + ": " + expanded.message());
      }
    }
    if (!any) return {};
    std::vector<Box> boxes;
    for (const DerivedPart& part : derived.parts) {
      for (Box& box : BoxesOf(part.pair.from)) boxes.push_back(std::move(box));
    }
    const Status covered = ProveTiling(Box::Whole(native.shape), boxes);
    if (!covered.ok()) {
      return InvalidArgument(
          "the pairs of tensor_mapping do not have each element of " +
          native.shape.ToString() + " once: " + covered.message());
    }
    out_.derived[native.name] = std::move(derived);
    return {};
  }

  // Every combination of what its names do not bind.
  Status Expand(size_t n, const ViewPair& pair, const Numbers& bound,
                DerivedTensor* derived) {
    const Dims& shape = natives_[n].shape;
    Numbers ranges;
    TC_RETURN_IF_ERROR(pair.native.Select(shape, bound, &ranges).status());
    if (!pair.stored.is_padding()) {
      Numbers first = bound;
      for (const auto& [name, count] : ranges) first.emplace(name, 0);
      if (!pair.stored.HasName(first)) {
        return InvalidArgument("a placeholder is in the stored name alone");
      }
      TC_ASSIGN_OR_RETURN(const uint32_t e,
                          FindStored(pair.stored.Name(first), pair));
      TC_RETURN_IF_ERROR(
          pair.stored.Select(entry(e).shape, bound, &ranges).status());
    }
    std::vector<std::pair<std::string, int64_t>> free(ranges.begin(),
                                                      ranges.end());
    int64_t count = 1;
    for (const auto& [name, range] : free) {
      if (range > 0 && count > kMostParts / range) {
        return Exhausted("it has too many parts");
      }
      count *= range;
    }
    parts_ += count;
    if (parts_ > kMostParts) return Exhausted("there are too many parts");
    Numbers numbers = bound;
    for (const auto& [name, range] : free) numbers[name] = 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i;
      for (auto at = free.rbegin(); at != free.rend(); ++at) {
        numbers[at->first] = rest % at->second;
        rest /= at->second;
      }
      TC_RETURN_IF_ERROR(Add(n, pair, numbers, derived));
    }
    return {};
  }

  Status Add(size_t n, const ViewPair& pair, const Numbers& numbers,
             DerivedTensor* derived) {
    Numbers none;
    DerivedPart part;
    TC_ASSIGN_OR_RETURN(part.pair.from,
                        pair.native.Select(natives_[n].shape, numbers, &none));
    if (pair.stored.is_padding()) {
      part.pair.to = part.pair.from;
      derived->parts.push_back(std::move(part));
      return {};
    }
    part.stored = pair.stored.Name(numbers);
    TC_ASSIGN_OR_RETURN(const uint32_t e, FindStored(part.stored, pair));
    TC_ASSIGN_OR_RETURN(part.pair.to,
                        pair.stored.Select(entry(e).shape, numbers, &none));
    if (!HaveOneShape(part.pair.from, part.pair.to)) {
      return InvalidArgument(
          "has the shape " + CountsOf(part.pair.to) + " in '" + part.stored +
          "' of " + entry(e).shape.ToString() + ", and " +
          CountsOf(part.pair.from) + " in " + natives_[n].shape.ToString());
    }
    derived->scaled = derived->scaled || checkpoint_.FindScaled(e) != nullptr;
    uses_[e].push_back({n, part.pair.to});
    derived->parts.push_back(std::move(part));
    return {};
  }

  // Of stored tensors what pairs say that nobody has.
  Status TakeUnused() {
    for (const ViewPair& pair : pairs_) {
      if (!pair.native.is_padding()) continue;
      for (uint32_t e = 0; e < catalog().entries().size(); ++e) {
        Numbers numbers = numbers_;
        if (entry(e).kind == EntryKind::kObject ||
            !pair.stored.Match(entry(e).name, &numbers)) {
          continue;
        }
        Numbers ranges;
        Result<Selection> taken =
            pair.stored.Select(entry(e).shape, numbers, &ranges);
        if (!taken.ok() || !ranges.empty()) {
          return InvalidArgument("pair " + pair.Text() + ": " +
                                 (taken.ok() ? "a placeholder stands for all"
                                             : taken.status().message()))
              .WithTensor(std::string(entry(e).name));
        }
        uses_[e].push_back({natives_.size(), std::move(*taken)});
      }
    }
    return {};
  }

  // No element is in two native tensors; who has which, where some are in none.
  Status CheckStored() {
    for (const auto& [e, uses] : uses_) {
      const CatalogEntry& stored = entry(e);
      int64_t total = 0;
      for (const Use& use : uses) total += ElementsOf(use.taken);
      const int64_t whole = Box::Whole(stored.shape).Volume();
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
              .WithTensor(std::string(stored.name));
        }
      }
      if (total == whole) continue;
      for (const Use& use : uses) {
        out_.partly.push_back(
            {std::string(stored.name),
             use.native < natives_.size() ? natives_[use.native].name : "",
             ElementsOf(use.taken), whole});
      }
    }
    return {};
  }

  // The one dtype of all parts; of codes that in which numbers are made.
  Result<Dtype> DtypeOf(const DerivedTensor& derived) const {
    if (derived.scaled) return Dtype::kF32;
    std::optional<Dtype> dtype;
    for (const DerivedPart& part : derived.parts) {
      if (part.stored.empty()) continue;
      const auto e = static_cast<uint32_t>(catalog().Find(part.stored));
      const Dtype own = entry(e).dtype;
      if (DtypeBits(own) < 8) {
        return Unsupported("'" + part.stored + "' is " + DtypeName(own) +
                           ", whose elements are no bytes of their own");
      }
      if (dtype && *dtype != own) {
        return Unsupported("'" + part.stored + "' is " + DtypeName(own) +
                           ", other parts of it are " + DtypeName(*dtype));
      }
      dtype = own;
    }
    if (!dtype) return InvalidArgument("all of it is padding");
    return *dtype;
  }

  Status Build() {
    CatalogBuilder builder;
    for (const NativeTensor& native : natives_) {
      const auto derived = out_.derived.find(native.name);
      if (derived == out_.derived.end()) continue;
      const Result<Dtype> dtype = DtypeOf(derived->second);
      if (!dtype.ok()) return Status(dtype.status()).WithTensor(native.name);
      TC_RETURN_IF_ERROR(
          builder.AddTensor(native.name, *dtype, native.shape).status());
    }
    std::set<std::string, std::less<>> used;
    for (const auto& [e, uses] : uses_) used.emplace(entry(e).name);
    const Status copied = catalog().CopyTo(&builder, used, checkpoint_.files());
    if (!copied.ok()) {
      return InvalidArgument(
                 "is a name of the model that pairs have, and of a stored "
                 "tensor that they do not have")
          .WithTensor(copied.tensor());
    }
    TC_ASSIGN_OR_RETURN(out_.catalog,
                        Catalog::From(std::move(builder), checkpoint_.files()));
    return {};
  }

  const Checkpoint& checkpoint_;
  const std::vector<NativeTensor>& natives_;
  const Numbers& numbers_;
  std::vector<ViewPair> pairs_;
  std::map<uint32_t, std::vector<Use>> uses_;  // by entry
  int64_t parts_ = 0;
  MappedCatalog out_;
};

}  // namespace

Result<MappedCatalog> MapTensors(const Checkpoint& checkpoint,
                                 const std::vector<MappingPair>& pairs,
                                 const std::vector<NativeTensor>& natives,
                                 const Numbers& numbers) {
  return Mapper(checkpoint, natives, numbers).Run(pairs);
}

}  // namespace torch_ckpt
