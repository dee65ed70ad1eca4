#include "format/torch/tensor.h"

#include <optional>
#include <span>
#include <string>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

// The arguments of torch._utils._rebuild_tensor_v2 and _v3.
enum TensorArgument : size_t {
  kStorageArgument,
  kOffsetArgument,
  kSizeArgument,
  kStrideArgument,
  kGradArgument,
  kMetadataArgument = 6,  // _v2
  kDtypeArgument = 6,     // _v3, its metadata behind it
};
// Those of torch._tensor._rebuild_from_type_v2: of tensors that have attributes
// or are of a class.
enum TypedArgument : size_t {
  kTypedFunction,
  kTypedType,
  kTypedArguments,
  kTypedState,
};
// And those of _rebuild_parameter: the tensor, and whether it has a gradient.
constexpr size_t kGradOfParameter = 1;
// A persistent id: ("storage", type, key, location, number of elements).
constexpr size_t kStorageFields = 5;

// A parameter is what it was made of: how deep may that go?
constexpr int kMaxWrappings = 4;

struct Storage {
  std::string_view key;
  const PickleValue* type = nullptr;  // a kName
  uint64_t elements = 0;
};

Result<Storage> ReadStorage(const PickleValue& value) {
  if (value.Is(PickleKind::kPersistent)) {
    const PickleValue& id = value.items()[0];
    if (id.Is(PickleKind::kTuple) && id.items().size() == kStorageFields) {
      const PickleValues fields = id.items();
      if (fields[0].Is(PickleKind::kString) && fields[0].text() == "storage" &&
          fields[1].Is(PickleKind::kName) &&
          fields[2].Is(PickleKind::kString) && fields[4].Is(PickleKind::kInt) &&
          fields[4].integer() >= 0) {
        return Storage{fields[2].text(), &fields[1],
                       static_cast<uint64_t>(fields[4].integer())};
      }
    }
  }
  return Corrupt("the pickle has a tensor without a storage");
}

bool IsTrue(PickleValues arguments, size_t at) {
  return arguments.size() > at && arguments[at].Is(PickleKind::kBool) &&
         arguments[at].boolean();
}

Status Impossible(const TorchTensor& tensor) {
  return Corrupt("the pickle has a tensor of impossible shape " +
                 tensor.shape.ToString());
}

// Sets `end`, and makes `strides` and `begin`, counted in elements, bytes.
Status InBytes(uint64_t element_bytes, TorchTensor* tensor) {
  const auto begin = CheckedMul(tensor->begin, element_bytes);
  if (!begin) return Impossible(*tensor);
  tensor->begin = *begin;
  uint64_t last = 0;
  bool empty = false;
  for (int d = 0; d < tensor->shape.size(); ++d) {
    empty = empty || tensor->shape[d] == 0;
    const auto stride =
        CheckedMul(static_cast<uint64_t>(tensor->strides[d]), element_bytes);
    if (!stride || *stride > static_cast<uint64_t>(INT64_MAX)) {
      return Impossible(*tensor);
    }
    tensor->strides[d] = static_cast<int64_t>(*stride);
    if (tensor->shape[d] == 0) continue;
    const auto steps =
        CheckedMul(*stride, static_cast<uint64_t>(tensor->shape[d] - 1));
    const auto sum = steps ? CheckedAdd(last, *steps) : steps;
    if (!sum) return Impossible(*tensor);
    last = *sum;
  }
  const auto end = CheckedAdd(last, empty ? 0 : element_bytes);
  const auto after = end ? CheckedAdd(tensor->begin, empty ? 0 : *end) : end;
  if (!after) return Impossible(*tensor);
  tensor->end = *after;
  return {};
}

bool IsTyped(PickleValues items) {
  return items.size() > kTypedArguments &&
         items[kTypedFunction].Is(PickleKind::kName) &&
         items[kTypedArguments].Is(PickleKind::kTuple) &&
         items[kTypedType].Is(PickleKind::kName) &&
         (items[kTypedType].name() == PickleName::kTensor ||
          items[kTypedType].name() == PickleName::kParameter ||
          items[kTypedType].name() == PickleName::kDTensor);
}

// What the parameters and attributes of `value` stand around, where that is a
// kind that is read: sparse, quantized and other tensors are not, however they
// are wrapped.
std::optional<TorchRebuild> Unwrap(const PickleValue& value) {
  TorchRebuild out;
  const PickleValue* made = &value;
  for (int i = 0; i < kMaxWrappings && made->Is(PickleKind::kMade); ++i) {
    if (i > 0) out.is_parameter = true;
    out.function = made->name();
    out.arguments = made->items();
    if (out.function == PickleName::kRebuildFromType) {
      const PickleValues typed = out.arguments;
      if (!IsTyped(typed)) return std::nullopt;
      out.function = typed[kTypedFunction].name();
      out.arguments = typed[kTypedArguments].items();
      out.type = typed[kTypedType].name();
      out.is_parameter = out.is_parameter || out.type == PickleName::kParameter;
      out.state = typed.size() > kTypedState ? &typed[kTypedState] : nullptr;
    }
    switch (out.function) {
      case PickleName::kRebuildTensor:
      case PickleName::kRebuildTensorV3:
        if (i == 0) out.requires_grad = IsTrue(out.arguments, kGradArgument);
        return out;
      case PickleName::kRebuildParameter:
      case PickleName::kRebuildParameterWithState:
        break;
      default:
        return IsTorchDTensor(out) ? std::optional(out) : std::nullopt;
    }
    if (out.arguments.empty()) return std::nullopt;
    out.requires_grad = IsTrue(out.arguments, kGradOfParameter);
    made = &out.arguments[0];
  }
  return std::nullopt;
}

}  // namespace

Result<Dims> ReadSize(const PickleValue& value) {
  PickleValues items;
  if (value.Is(PickleKind::kMade, PickleName::kSize) &&
      value.items().size() == 1) {
    items = value.items()[0].Is(PickleKind::kTuple) ||
                    value.items()[0].Is(PickleKind::kList)
                ? value.items()[0].items()
                : PickleValues{};
  } else if (value.Is(PickleKind::kTuple) || value.Is(PickleKind::kList)) {
    items = value.items();
  } else {
    return Corrupt("the pickle has no size where one belongs");
  }
  if (items.size() > kMaxDims) {
    return Unsupported("has " + std::to_string(items.size()) +
                       " dimensions; at most " + std::to_string(kMaxDims) +
                       " are supported");
  }
  Dims out;
  for (const PickleValue& item : items) {
    if (!item.Is(PickleKind::kInt) || item.integer() < 0 ||
        item.integer() > kMaxDimension) {
      return Corrupt("the pickle has a size that is no size");
    }
    out.push_back(item.integer());
  }
  return out;
}

bool IsTorchTensor(const PickleValue& value) {
  return Unwrap(value).has_value();
}

TorchRebuild FindTorchRebuild(const PickleValue& value) {
  return *Unwrap(value);
}

bool IsTorchDTensor(const TorchRebuild& rebuild) {
  return rebuild.function == PickleName::kRebuildWrapperSubclass &&
         rebuild.type == PickleName::kDTensor;
}

Result<TorchTensor> ReadTorchTensor(const PickleValue& value) {
  const TorchRebuild rebuild = FindTorchRebuild(value);
  if (IsTorchDTensor(rebuild)) {
    return Unsupported(
        "is a DTensor, of which one rank's part is read as a leaf of a state "
        "dict only");
  }
  const PickleValues arguments = rebuild.arguments;
  const bool v3 = rebuild.function == PickleName::kRebuildTensorV3;
  if (arguments.size() <= (v3 ? kDtypeArgument : kStrideArgument)) {
    return Corrupt("the pickle has a tensor without its arguments");
  }
  // {"conj": True} and {"neg": True}: the elements are not what is stored.
  const size_t metadata = kMetadataArgument + (v3 ? 1 : 0);
  if (arguments.size() > metadata &&
      !arguments[metadata].Is(PickleKind::kNone) &&
      !(arguments[metadata].Is(PickleKind::kDict) &&
        arguments[metadata].items().empty())) {
    return Unsupported(
        "is a view that torch negates or conjugates when it is read, which is "
        "not done here");
  }
  TC_ASSIGN_OR_RETURN(const Storage storage,
                      ReadStorage(arguments[kStorageArgument]));
  TorchTensor out;
  out.storage = storage.key;
  out.storage_elements = storage.elements;
  if (storage.type->Is(PickleKind::kName, PickleName::kStorage)) {
    out.storage_element_bytes =
        static_cast<uint64_t>(DtypeUnit(storage.type->dtype()).bytes);
  }
  const PickleValue& typed = v3 ? arguments[kDtypeArgument] : *storage.type;
  if (const std::string_view other = UnknownName(typed); !other.empty()) {
    return Unsupported("is of the type " + std::string(other) +
                       ", which safetensors has no name for");
  }
  if (typed.Is(PickleKind::kName, PickleName::kOtherDtype)) {
    return Unsupported("is of a dtype that safetensors has no name for");
  }
  if (!typed.Is(PickleKind::kName,
                v3 ? PickleName::kDtype : PickleName::kStorage)) {
    return Corrupt("the pickle has a tensor without a dtype");
  }
  out.dtype = typed.dtype();
  TC_ASSIGN_OR_RETURN(out.shape, ReadSize(arguments[kSizeArgument]));
  TC_ASSIGN_OR_RETURN(out.strides, ReadSize(arguments[kStrideArgument]));
  const PickleValue& offset = arguments[kOffsetArgument];
  if (out.strides.size() != out.shape.size() || !offset.Is(PickleKind::kInt) ||
      offset.integer() < 0) {
    return Corrupt("the pickle has a tensor without strides");
  }
  out.begin = static_cast<uint64_t>(offset.integer());
  const Unit unit = DtypeUnit(out.dtype);
  TC_RETURN_IF_ERROR(InBytes(static_cast<uint64_t>(unit.bytes), &out));
  // torch counts packed elements as one: float4_e2m1fn_x2 is a byte of two.
  if (unit.elements > 1) {
    if (out.shape.empty()) {
      return Unsupported("is a packed tensor without dimensions");
    }
    out.shape[out.shape.size() - 1] *= unit.elements;
  }
  if (!ByteSize(out.dtype, out.shape).ok()) return Impossible(out);
  return out;
}

}  // namespace torch_ckpt
