#include "format/torch/unread.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "format/torch/tensor.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kTorch = "torch.";
constexpr std::string_view kRebuild = "torch._utils._rebuild_";
constexpr int kMostWrapped = 8;
constexpr size_t kMostParts = 8;  // of a sparse tensor
// PickleValues in each other that are looked through, more than Python can
// pickle; those that hold themselves have no end.
constexpr size_t kMostDeep = 1000;

// Storages that have a dtype which ours lack, and that dtype.
constexpr std::array<std::pair<std::string_view, std::string_view>, 7>
    kStorages = {{{"torch.ComplexDoubleStorage", "complex128"},
                  {"torch.ComplexHalfStorage", "complex32"},
                  {"torch.QInt32Storage", "qint32"},
                  {"torch.QInt8Storage", "qint8"},
                  {"torch.QUInt2x4Storage", "quint2x4"},
                  {"torch.QUInt4x2Storage", "quint4x2"},
                  {"torch.QUInt8Storage", "quint8"}}};

// The function that makes `value`, without kRebuild, and its arguments.
struct Call {
  std::string_view function;  // empty: none of torch's
  PickleValues arguments;
};

Call CallOf(const PickleValue& value) {
  if (value.Is(PickleKind::kObject, PickleName::kUnknown)) {
    const std::string_view name = UnknownName(value);
    const PickleValues made = value.object().arguments.items();
    if (!name.starts_with(kRebuild) || made.size() != 2 ||
        !made[1].Is(PickleKind::kTuple)) {
      return {};
    }
    return {name.substr(kRebuild.size()), made[1].items()};
  }
  if (!value.Is(PickleKind::kMade)) return {};
  switch (value.name()) {
    case PickleName::kRebuildTensor:
      return {"tensor_v2", value.items()};
    case PickleName::kRebuildTensorV3:
      return {"tensor_v3", value.items()};
    case PickleName::kRebuildParameter:
    case PickleName::kRebuildParameterWithState:
      return {"parameter", value.items()};
    case PickleName::kRebuildWrapperSubclass:
      return {"wrapper_subclass", value.items()};
    case PickleName::kRebuildFromType:
      return {"from_type", value.items()};
    default:
      return {};
  }
}

// The same of a function that is named in the arguments of another.
Call CallOf(const PickleValue& function, const PickleValue& arguments) {
  if (!function.Is(PickleKind::kName) || !arguments.Is(PickleKind::kTuple)) {
    return {};
  }
  const PickleValues items = arguments.items();
  switch (function.name()) {
    case PickleName::kRebuildTensor:
      return {"tensor_v2", items};
    case PickleName::kRebuildTensorV3:
      return {"tensor_v3", items};
    case PickleName::kRebuildParameter:
    case PickleName::kRebuildParameterWithState:
      return {"parameter", items};
    case PickleName::kRebuildWrapperSubclass:
      return {"wrapper_subclass", items};
    case PickleName::kUnknown:
      return function.text().starts_with(kRebuild)
                 ? Call{function.text().substr(kRebuild.size()), items}
                 : Call{};
    default:
      return {};
  }
}

std::optional<Dims> SizeOf(PickleValues arguments, size_t at) {
  if (at >= arguments.size()) return std::nullopt;
  Result<Dims> size = ReadSize(arguments[at]);
  return size.ok() ? std::optional(*std::move(size)) : std::nullopt;
}

std::string DtypeText(const PickleValue& value) {
  if (value.Is(PickleKind::kName, PickleName::kDtype) ||
      value.Is(PickleKind::kName, PickleName::kStorage)) {
    return DtypeName(value.dtype());
  }
  return std::string(NamedDtype(value));
}

// Of the persistent id of a storage.
std::string DtypeOfStorage(PickleValues arguments, size_t at) {
  if (at >= arguments.size() || !arguments[at].Is(PickleKind::kPersistent)) {
    return {};
  }
  const PickleValue& id = arguments[at].items()[0];
  return id.Is(PickleKind::kTuple) && id.items().size() > 1
             ? DtypeText(id.items()[1])
             : std::string();
}

class Describer {
 public:
  UnreadTensor Take(std::string_view why) {
    if (!why.empty()) out_.reason = why;
    if (out_.reason.empty()) out_.reason = "is of an unknown kind";
    if (out_.dtype.empty()) out_.dtype = "?";
    return std::move(out_);
  }

  void Describe(const Call& call, int depth = 0) {
    const PickleValues items = call.arguments;
    if (depth == kMostWrapped || call.function.empty()) return;
    if (call.function.starts_with("parameter")) {
      if (!items.empty()) Describe(CallOf(items[0]), depth + 1);
    } else if (call.function.starts_with("from_type")) {
      if (items.size() < 3) return;
      Describe(CallOf(items[0], items[2]), depth + 1);
      Class(items[1]);
    } else if (call.function == "tensor_v2" || call.function == "tensor") {
      Set(DtypeOfStorage(items, 0), SizeOf(items, 2));
    } else if (call.function == "tensor_v3") {
      Set(items.size() > 6 ? DtypeText(items[6]) : "", SizeOf(items, 2));
    } else if (call.function == "wrapper_subclass") {
      Set(items.size() > 1 ? DtypeText(items[1]) : "", SizeOf(items, 2));
      if (!items.empty()) Class(items[0]);
    } else if (call.function == "qtensor") {
      Set(DtypeOfStorage(items, 0), SizeOf(items, 2));
      out_.reason = "is a quantized tensor";
    } else if (call.function == "sparse_tensor") {
      Sparse(items);
    } else if (call.function == "nested_tensor") {
      if (!items.empty()) Describe(CallOf(items[0]), depth + 1);
      out_.shape.reset();
      out_.reason = "is a nested tensor";
    } else if (call.function == "meta_tensor_no_storage") {
      Set(items.empty() ? "" : DtypeText(items[0]), SizeOf(items, 1));
      out_.reason = "is a meta tensor, which has no elements";
    } else {
      out_.reason =
          "is made by " + std::string(kRebuild) + std::string(call.function);
    }
  }

 private:
  void Set(std::string dtype, std::optional<Dims> shape) {
    out_.dtype = std::move(dtype);
    out_.shape = std::move(shape);
  }
  void Class(const PickleValue& type) {
    const std::string_view name = UnknownName(type);
    if (!name.empty()) {
      out_.reason = "is a tensor of the class " + std::string(name);
    }
  }
  // (layout, (indices, values, size, ...)), or two tensors of indices.
  void Sparse(PickleValues items) {
    out_.reason = "is a sparse tensor";
    if (items.size() < 2 || !items[1].Is(PickleKind::kTuple)) return;
    const PickleValues parts = items[1].items();
    // Many leaves may share them.
    for (size_t i = 0; i < std::min(parts.size(), kMostParts); ++i) {
      if (!IsAnyTensor(parts[i])) {
        if (!out_.shape) out_.shape = SizeOf(parts, i);
        continue;
      }
      // The values come last.
      const Call call = CallOf(parts[i]);
      out_.dtype = call.function == "tensor_v3" && call.arguments.size() > 6
                       ? DtypeText(call.arguments[6])
                       : DtypeOfStorage(call.arguments, 0);
    }
  }

  UnreadTensor out_;
};

}  // namespace

bool IsAnyTensor(const PickleValue& value) {
  return !CallOf(value).function.empty();
}

UnreadTensor DescribeUnread(const PickleValue& value, std::string_view why) {
  Describer describer;
  describer.Describe(CallOf(value));
  return describer.Take(why);
}

std::string FindHiddenTensor(const PickleValue& value, Budget* budget) {
  const std::string inside = "is no tensor, but has one inside that ";
  bool found = false;
  std::string_view unknown;
  std::vector<PickleValues> left = {PickleValues(&value, 1)};
  while (!left.empty()) {
    if (left.back().empty()) {
      left.pop_back();
      continue;
    }
    if (!budget->Step()) return "is too much to be looked through for tensors";
    const PickleValue& each = left.back()[0];
    left.back() = left.back().subspan(1);
    if (IsTorchTensor(each)) {
      const Status read = ReadTorchTensor(each).status();
      if (read.kind() == ErrorKind::kUnsupported) {
        return inside + DescribeUnread(each, read.message()).reason;
      }
      found = true;
      continue;
    }
    if (IsAnyTensor(each)) return inside + DescribeUnread(each, {}).reason;
    if (unknown.empty()) unknown = UnknownName(each);
    if (left.size() > kMostDeep) continue;
    switch (each.kind()) {
      case PickleKind::kObject:
        for (const PickleValue* part :
             {&each.object().arguments, &each.object().state,
              &each.object().items}) {
          left.emplace_back(part, 1);
        }
        break;
      case PickleKind::kTuple:
      case PickleKind::kList:
      case PickleKind::kSet:
      case PickleKind::kDict:
      case PickleKind::kMade:
        left.push_back(each.items());
        break;
      default:
        break;
    }
  }
  if (!found || unknown.empty()) return {};
  return "is no tensor, but has some inside, beside an object of " +
         std::string(unknown);
}

std::string_view NamedDtype(const PickleValue& value) {
  if (!value.Is(PickleKind::kName)) return {};
  if (value.name() == PickleName::kDtype) return TorchDtypeName(value.dtype());
  if (value.name() == PickleName::kOtherDtype) {
    return OtherDtypeName(value.dtype());
  }
  const std::string_view name = UnknownName(value);
  for (const auto& [storage, dtype] : kStorages) {
    if (name == storage) return dtype;
  }
  return name.starts_with(kTorch) ? name.substr(kTorch.size())
                                  : std::string_view();
}

}  // namespace torch_ckpt
