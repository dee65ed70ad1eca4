#include "format/torch/pickle_object.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "format/json.h"
#include "format/names.h"
#include "format/torch/pickle_values.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kTag = "$";

void AppendBase64(std::string* out, std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t word = 0;
    for (size_t j = 0; j < 3; ++j) {
      word = word << 8 |
             (j < count ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    }
    for (size_t j = 0; j < 4; ++j) {
      *out += j <= count ? kDigits[word >> (18 - 6 * j) & 63] : '=';
    }
  }
}

class ObjectWriter {
 public:
  ObjectWriter(const TensorBytes& tensor_bytes, Budget* budget)
      : tensor_bytes_(tensor_bytes), budget_(*budget) {}

  Result<std::string> Take() {
    TC_RETURN_IF_ERROR(Fits(0));
    if (!budget_.Keep(out_.size())) return budget_.Over();
    return std::move(out_);
  }

  Status Write(const PickleValue& value) {
    TC_RETURN_IF_ERROR(Fits(0));
    switch (value.kind()) {
      case PickleKind::kNone:
        return Plain("null");
      case PickleKind::kBool:
        return Plain(value.boolean() ? "true" : "false");
      case PickleKind::kInt:
        return Int(value.integer());
      case PickleKind::kBigInt:
        return BigInt(value.text());
      case PickleKind::kFloat:
        return Float(value.real());
      case PickleKind::kString:
        return Text(value.text());
      case PickleKind::kBytes:
        Open("bytes");
        return Data(value.text());
      case PickleKind::kTuple:
        Open("tuple");
        return Listed(value.items(), "}");
      case PickleKind::kList:
        return List(value.items());
      case PickleKind::kSet:
        return Set("set", value.items());
      case PickleKind::kDict:
        return Dict(value.items());
      case PickleKind::kName:
        return Named(value);
      case PickleKind::kMade:
        return Made(value);
      case PickleKind::kObject:
        return Object(value);
      case PickleKind::kPersistent:
        break;
    }
    return Corrupt("the object has a storage outside of a tensor");
  }

 private:
  // Before a value is written that has `bytes` of data: what stands in many
  // places is written in each. Of what is left for all that are read together.
  Status Fits(uint64_t bytes) {
    if (!budget_.Touch(bytes)) return budget_.Over();
    const uint64_t left = budget_.kept_left();
    if (out_.size() <= left && bytes <= left - out_.size()) return {};
    return Exhausted("the object takes more than " + std::to_string(left) +
                     " bytes as text, which is what is left of " +
                     std::to_string(budget_.most_kept() >> 20) +
                     " MiB for all that are read together");
  }
  Status Plain(std::string_view text) {
    out_ += text;
    return {};
  }
  // {"$":"<tag>"
  void Open(std::string_view tag) {
    out_ += "{\"$\":\"";
    out_ += tag;
    out_ += '"';
  }
  void Member(std::string_view name) {
    out_ += ",\"";
    out_ += name;
    out_ += "\":";
  }

  // --- scalars ---

  Status Int(int64_t number) {
    if (number == INT64_MIN) {
      return Plain("{\"$\":\"int\",\"v\":\"-0x8000000000000000\"}");
    }
    return Plain(std::to_string(number));
  }
  // Two's complement, little-endian.
  Status BigInt(std::string_view bytes) {
    TC_RETURN_IF_ERROR(Fits(bytes.size()));
    std::string magnitude(bytes);
    const bool negative = (bytes.back() & 0x80) != 0;
    if (negative) {
      unsigned carry = 1;
      for (char& c : magnitude) {
        const unsigned sum =
            (~static_cast<unsigned>(static_cast<unsigned char>(c)) & 0xff) +
            carry;
        c = static_cast<char>(sum);
        carry = sum >> 8;
      }
    }
    std::string digits;
    AppendHex(&digits,
              AsBytes(std::string(magnitude.rbegin(), magnitude.rend())));
    digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size() - 1));
    Open("int");
    Member("v");
    return Plain(std::string("\"") + (negative ? "-0x" : "0x") + digits +
                 "\"}");
  }
  Status Float(double number) {
    if (!std::isfinite(number)) {
      Open("float");
      Member("v");
      return Plain(std::isnan(number) ? "\"nan\"}"
                   : number > 0       ? "\"inf\"}"
                                      : "\"-inf\"}");
    }
    std::array<char, 32> raw;
    const auto end =
        std::to_chars(raw.data(), raw.data() + raw.size(), number).ptr;
    const std::string_view text(raw.data(), end);
    out_ += text;
    return Plain(text.find_first_of(".e") == text.npos ? ".0" : "");
  }
  Status Text(std::string_view text) {
    TC_RETURN_IF_ERROR(Fits(text.size()));
    if (IsUtf8(text)) {
      AppendJsonString(&out_, text);
      return {};
    }
    // Surrogates, as pickles and this grammar have them; others are refused by
    // who reads it.
    Open("str");
    Member("v");
    out_ += '"';
    AppendHex(&out_, AsBytes(text));
    return Plain("\"}");
  }
  // The member that has `bytes`, and the end of the object.
  Status Data(std::string_view bytes) {
    TC_RETURN_IF_ERROR(Fits(bytes.size()));
    Member("b");
    out_ += '"';
    AppendBase64(&out_, bytes);
    return Plain("\"}");
  }

  // --- containers ---

  Status Enter() {
    if (++depth_ <= kMaxNestedContainers) return {};
    return Unsupported("the object nests deeper than " +
                       std::to_string(kMaxNestedContainers) + " containers");
  }
  Status List(PickleValues items) {
    TC_RETURN_IF_ERROR(Enter());
    out_ += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += ',';
      TC_RETURN_IF_ERROR(Write(items[i]));
    }
    out_ += ']';
    --depth_;
    return {};
  }
  Status Listed(PickleValues items, std::string_view end) {
    Member("v");
    TC_RETURN_IF_ERROR(List(items));
    return Plain(end);
  }
  Status Set(std::string_view tag, PickleValues items) {
    Open(tag);
    return Listed(items, "}");
  }
  Status Dict(PickleValues items) {
    bool plain = true;
    std::set<std::string_view> keys;
    for (size_t i = 0; plain && i + 1 < items.size(); i += 2) {
      plain = items[i].Is(PickleKind::kString);
      if (!plain) break;
      const std::string_view key = items[i].text();
      TC_RETURN_IF_ERROR(Fits(key.size()));
      plain = key != kTag && IsUtf8(key) && keys.insert(key).second;
    }
    if (!plain) {
      Open("dict");
      return Pairs(items);
    }
    TC_RETURN_IF_ERROR(Enter());
    out_ += '{';
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (i > 0) out_ += ',';
      TC_RETURN_IF_ERROR(Text(items[i].text()));
      out_ += ':';
      TC_RETURN_IF_ERROR(Write(items[i + 1]));
    }
    out_ += '}';
    --depth_;
    return {};
  }
  Status Pairs(PickleValues items) {
    TC_RETURN_IF_ERROR(Enter());
    Member("v");
    out_ += '[';
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      out_ += i > 0 ? ",[" : "[";
      TC_RETURN_IF_ERROR(Write(items[i]));
      out_ += ',';
      TC_RETURN_IF_ERROR(Write(items[i + 1]));
      out_ += ']';
    }
    --depth_;
    return Plain("]}");
  }

  // --- what names stand for ---

  Status CannotSay(const char* what) {
    return Unsupported(std::string("the object has ") + what +
                       ", which typed JSON cannot say");
  }
  Status Named(const PickleValue& value) {
    if (value.name() == PickleName::kUnknown) return NamedSignal(value.text());
    if (value.name() == PickleName::kOtherDtype) {
      return CannotSay("a dtype that safetensors has no name for");
    }
    if (value.name() != PickleName::kDtype) {
      return CannotSay("a class or a function");
    }
    return Tagged("dtype", TorchDtypeName(value.dtype()));
  }
  // Members of signal.Signals are pickled by their own names.
  Status NamedSignal(std::string_view name) {
    constexpr std::string_view kPrefix = "signal.SIG";
    if (!name.starts_with(kPrefix) ||
        !std::all_of(name.begin() + kPrefix.size(), name.end(), [](char c) {
          return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        })) {
      return RefuseUnknownName(name);
    }
    Open("enum");
    Member("c");
    out_ += "\"signal:Signals\"";
    Member("n");
    AppendJsonString(&out_, name.substr(name.find('.') + 1));
    return Plain("}");
  }
  Status Made(const PickleValue& value) {
    if (IsTorchTensor(value)) return Tensor(value);
    const PickleValues arguments = value.items();
    switch (value.name()) {
      case PickleName::kSize:
        return Size(arguments);
      case PickleName::kDevice:
        return Device(arguments);
      case PickleName::kLayout:
        return Layout(arguments);
      case PickleName::kSet:
      case PickleName::kFrozenSet:
        if (arguments.size() == 1 && (arguments[0].Is(PickleKind::kList) ||
                                      arguments[0].Is(PickleKind::kTuple))) {
          return Set(value.name() == PickleName::kSet ? "set" : "frozenset",
                     arguments[0].items());
        }
        break;
      case PickleName::kCounter:
        if (arguments.size() != 1 || !arguments[0].Is(PickleKind::kDict)) break;
        Open("counter");
        return Pairs(arguments[0].items());
      case PickleName::kEncode:
      case PickleName::kBytes:
      case PickleName::kBytearray: {
        TC_ASSIGN_OR_RETURN(const std::string bytes,
                            BytesOfPickle(value, &budget_));
        Open(value.name() == PickleName::kBytearray ? "bytearray" : "bytes");
        return Data(bytes);
      }
      case PickleName::kComplex:
        if (arguments.size() == 2 && arguments[0].Is(PickleKind::kFloat) &&
            arguments[1].Is(PickleKind::kFloat)) {
          Open("complex");
          return Listed(arguments, "}");
        }
        break;
      case PickleName::kSlice:
      case PickleName::kRange:
        if (arguments.size() != 3) break;
        Open(value.name() == PickleName::kSlice ? "slice" : "range");
        return Listed(arguments, "}");
      case PickleName::kPosixPath:
        return Path("PosixPath", '/', arguments);
      case PickleName::kPurePosixPath:
        return Path("PurePosixPath", '/', arguments);
      case PickleName::kWindowsPath:
        return Path("WindowsPath", '\\', arguments);
      case PickleName::kPureWindowsPath:
        return Path("PureWindowsPath", '\\', arguments);
      case PickleName::kArrayScalar:
        return ArrayScalar(arguments);
      case PickleName::kArrayFromBuffer:
        if (arguments.size() != 4 || !arguments[3].Is(PickleKind::kString)) {
          break;
        }
        return Array(arguments[2], arguments[1], arguments[3].text() == "F",
                     arguments[0]);
      default:
        return CannotSay("something of torch's own");
    }
    return Corrupt("the object has arguments that do not belong to it");
  }
  static Result<std::string> DeviceName(PickleValues arguments) {
    if (arguments.empty() || !arguments[0].Is(PickleKind::kString)) {
      return Corrupt("the object has a device without a name");
    }
    std::string name(arguments[0].text());
    if (arguments.size() > 1 && arguments[1].Is(PickleKind::kInt)) {
      name += ":" + std::to_string(arguments[1].integer());
    }
    return name;
  }
  Status Device(PickleValues arguments) {
    TC_ASSIGN_OR_RETURN(const std::string name, DeviceName(arguments));
    return Tagged("device", name);
  }
  Status Layout(PickleValues arguments) {
    constexpr std::string_view kPrefix = "torch.";
    if (arguments.size() != 1 || !arguments[0].Is(PickleKind::kString) ||
        !arguments[0].text().starts_with(kPrefix)) {
      return Corrupt("the object has a layout without a name");
    }
    return Tagged("layout", arguments[0].text().substr(kPrefix.size()));
  }
  Status Size(PickleValues arguments) {
    const bool listed =
        arguments.size() == 1 && (arguments[0].Is(PickleKind::kTuple) ||
                                  arguments[0].Is(PickleKind::kList));
    if (!listed) return Corrupt("the object has a size of no numbers");
    for (const PickleValue& item : arguments[0].items()) {
      if (!item.Is(PickleKind::kInt)) {
        return Corrupt("the object has a size of no numbers");
      }
    }
    Open("size");
    return Listed(arguments[0].items(), "}");
  }
  // Of its parts, the first of which may be a root that ends in `separator`.
  Status Path(std::string_view type, char separator, PickleValues parts) {
    std::string path;
    for (const PickleValue& part : parts) {
      if (!part.Is(PickleKind::kString)) {
        return Corrupt("the object has a path that is no text");
      }
      if (!path.empty() && path.back() != separator) path += separator;
      TC_RETURN_IF_ERROR(Fits(part.text().size()));
      path += part.text();
      if (path.size() > budget_.kept_left()) return Fits(path.size());
    }
    Open("path");
    Member("t");
    AppendJsonString(&out_, type);
    Member("v");
    TC_RETURN_IF_ERROR(Text(path.empty() ? "." : path));
    return Plain("}");
  }
  Status Tagged(std::string_view tag, std::string_view text) {
    Open(tag);
    Member("v");
    TC_RETURN_IF_ERROR(Text(text));
    return Plain("}");
  }

  Status Tensor(const PickleValue& value) {
    TC_ASSIGN_OR_RETURN(const TorchTensor tensor, ReadTorchTensor(value));
    TC_ASSIGN_OR_RETURN(const std::string bytes, tensor_bytes_(tensor));
    const TorchRebuild rebuild = FindTorchRebuild(value);
    Dims shape = tensor.shape;
    const int64_t packed = DtypeUnit(tensor.dtype).elements;
    if (packed > 1) shape[shape.size() - 1] /= packed;
    Open(rebuild.is_parameter ? "parameter" : "tensor");
    Member("t");
    AppendJsonString(&out_, TorchDtypeName(tensor.dtype));
    Member("s");
    AppendJsonDims(&out_, shape);
    Member("g");
    out_ += rebuild.requires_grad ? "true" : "false";
    return Data(bytes);
  }

  // --- objects with a state ---

  Status Object(const PickleValue& value) {
    const PickleObject& object = value.object();
    const PickleValues items = object.items.items();
    switch (value.name()) {
      case PickleName::kOrderedDict:
        // Attributes of state dicts, which are versions of modules, are left
        // out.
        if (!object.arguments.items().empty()) {
          return CannotSay("an OrderedDict that is made of another one");
        }
        Open("odict");
        return Pairs(items);
      case PickleName::kDefaultDict: {
        const auto factory = FactoryOfDefaultDict(value);
        if (!factory) {
          return CannotSay("a defaultdict whose default_factory is no type");
        }
        Open("defaultdict");
        Member("f");
        AppendJsonString(&out_, *factory);
        return Pairs(items);
      }
      case PickleName::kNamespace:
        return Namespace("argparse", object);
      case PickleName::kSimpleNamespace:
        return Namespace("simple", object);
      case PickleName::kDeque:
        return Deque(object.arguments.items(), items);
      case PickleName::kReconstructArray:
        return ArrayOfState(object.state);
      case PickleName::kBytesIo:
        return BytesIo(object);
      case PickleName::kGenerator:
        return Generator(object);
      case PickleName::kUnknown:
        return Unknown(value);
      default:
        return CannotSay("something of torch's own");
    }
  }
  // What a class that is not on the list has made, in the two forms that are
  // data: a member of an enum is made of its value, a record of nothing, and
  // its attributes are its state. Whether it is such a class who reads this
  // has to know.
  Status Unknown(const PickleValue& value) {
    const std::string_view name = UnknownName(value);
    const PickleObject& object = value.object();
    const size_t dot = name.rfind('.');
    const PickleValues called = object.arguments.items();
    if (dot == name.npos || !object.items.Is(PickleKind::kNone) ||
        called.size() != 2 || !called[1].Is(PickleKind::kTuple)) {
      return RefuseUnknownName(name);
    }
    const PickleValues arguments = called[1].items();
    const bool is_record =
        arguments.empty() && HasAttributesAlone(object.state);
    const bool is_member = arguments.size() == 1 && IsScalar(arguments[0]) &&
                           object.state.Is(PickleKind::kNone);
    if (!is_record && !is_member) return RefuseUnknownName(name);
    Open(is_record ? "record" : "enum");
    Member("c");
    TC_RETURN_IF_ERROR(Text(std::string(name.substr(0, dot)) + ":" +
                            std::string(name.substr(dot + 1))));
    if (is_record) return Pairs(object.state.items());
    Member("v");
    TC_RETURN_IF_ERROR(Write(arguments[0]));
    return Plain("}");
  }
  static bool IsScalar(const PickleValue& value) {
    return value.Is(PickleKind::kInt) || value.Is(PickleKind::kBigInt) ||
           value.Is(PickleKind::kString) || value.Is(PickleKind::kFloat) ||
           value.Is(PickleKind::kBool);
  }
  // Whether a state is a dict of names.
  static bool HasAttributesAlone(const PickleValue& state) {
    if (!state.Is(PickleKind::kDict)) return false;
    const PickleValues attributes = state.items();
    for (size_t i = 0; i < attributes.size(); i += 2) {
      if (!attributes[i].Is(PickleKind::kString)) return false;
    }
    return true;
  }
  // Its state is (bytes, position, attributes).
  Status BytesIo(const PickleObject& object) {
    const PickleValue& state = object.state;
    const bool fits =
        object.arguments.items().empty() && state.Is(PickleKind::kTuple) &&
        state.items().size() == 3 && state.items()[1].Is(PickleKind::kInt) &&
        state.items()[1].integer() >= 0;
    if (!fits) return Corrupt("the object has a BytesIO without a state");
    if (!state.items()[2].Is(PickleKind::kNone)) {
      return CannotSay("a BytesIO with attributes");
    }
    TC_ASSIGN_OR_RETURN(const std::string bytes,
                        BytesOfPickle(state.items()[0], &budget_));
    Open("bytesio");
    Member("p");
    out_ += std::to_string(state.items()[1].integer());
    return Data(bytes);
  }
  // It is made of a device. Its state is (seed, offset, bytes), of which the
  // bytes say all.
  Status Generator(const PickleObject& object) {
    const PickleValues made_of = object.arguments.items();
    const PickleValue& state = object.state;
    const bool fits = made_of.size() == 1 && made_of[0].Is(PickleKind::kMade) &&
                      made_of[0].name() == PickleName::kDevice &&
                      state.Is(PickleKind::kTuple) &&
                      state.items().size() == 3 &&
                      IsTorchTensor(state.items()[2]);
    if (!fits) return Corrupt("the object has a Generator without a state");
    TC_ASSIGN_OR_RETURN(const std::string device,
                        DeviceName(made_of[0].items()));
    TC_ASSIGN_OR_RETURN(const TorchTensor tensor,
                        ReadTorchTensor(state.items()[2]));
    if (tensor.dtype != Dtype::kU8) {
      return Corrupt("the object has a Generator whose state is no bytes");
    }
    TC_ASSIGN_OR_RETURN(const std::string bytes, tensor_bytes_(tensor));
    Open("generator");
    Member("d");
    TC_RETURN_IF_ERROR(Text(device));
    return Data(bytes);
  }
  // Its attributes are its state.
  Status Namespace(std::string_view kind, const PickleObject& object) {
    const PickleValue& state = object.state;
    if (!object.arguments.items().empty() ||
        (!state.Is(PickleKind::kDict) && !state.Is(PickleKind::kNone))) {
      return Corrupt("the object has arguments that do not belong to it");
    }
    const PickleValues attributes =
        state.Is(PickleKind::kDict) ? state.items() : PickleValues{};
    for (size_t i = 0; i < attributes.size(); i += 2) {
      if (attributes[i].Is(PickleKind::kString)) continue;
      return Corrupt("the object has an attribute without a name");
    }
    Open("namespace");
    Member("t");
    AppendJsonString(&out_, kind);
    return Pairs(attributes);
  }
  // deque((), limit), to which items are added.
  Status Deque(PickleValues arguments, PickleValues items) {
    const bool limited = arguments.size() == 2;
    if (arguments.size() > 2 ||
        (!arguments.empty() && !(arguments[0].Is(PickleKind::kTuple) &&
                                 arguments[0].items().empty())) ||
        (limited && !arguments[1].Is(PickleKind::kInt))) {
      return Corrupt("the object has arguments that do not belong to it");
    }
    Open("deque");
    Member("m");
    out_ += limited ? std::to_string(arguments[1].integer()) : "null";
    return Listed(items, "}");
  }
  Status ArrayScalar(PickleValues arguments) {
    if (arguments.size() != 2) {
      return Corrupt("the object has a numpy value without bytes");
    }
    TC_ASSIGN_OR_RETURN(const std::string code,
                        ArrayTypeOfPickle(arguments[0], &budget_));
    TC_ASSIGN_OR_RETURN(const std::string bytes,
                        BytesOfPickle(arguments[1], &budget_));
    Open("npscalar");
    Member("t");
    AppendJsonString(&out_, code);
    return Data(bytes);
  }
  // The state of an array: (version, shape, dtype, in Fortran's order, bytes).
  Status ArrayOfState(const PickleValue& state) {
    if (!state.Is(PickleKind::kTuple) || state.items().size() != 5 ||
        !state.items()[3].Is(PickleKind::kBool)) {
      return Corrupt("the object has a numpy array without a state");
    }
    const PickleValues parts = state.items();
    return Array(parts[1], parts[2], parts[3].boolean(), parts[4]);
  }
  Status Array(const PickleValue& size, const PickleValue& type, bool fortran,
               const PickleValue& data) {
    if (data.Is(PickleKind::kList)) return CannotSay("an array of objects");
    TC_ASSIGN_OR_RETURN(const Dims shape, ReadSize(size));
    TC_ASSIGN_OR_RETURN(const std::string code,
                        ArrayTypeOfPickle(type, &budget_));
    TC_ASSIGN_OR_RETURN(const std::string bytes, BytesOfPickle(data, &budget_));
    Open("ndarray");
    Member("t");
    AppendJsonString(&out_, code);
    Member("s");
    AppendJsonDims(&out_, shape);
    Member("o");
    out_ += fortran ? "\"F\"" : "\"C\"";
    return Data(bytes);
  }

  const TensorBytes& tensor_bytes_;
  Budget& budget_;
  std::string out_;
  int depth_ = 0;
};

}  // namespace

Result<std::string> ObjectOfPickle(const PickleValue& value,
                                   const TensorBytes& tensor_bytes,
                                   Budget* budget) {
  ObjectWriter writer(tensor_bytes, budget);
  TC_RETURN_IF_ERROR(writer.Write(value));
  return writer.Take();
}

}  // namespace torch_ckpt
