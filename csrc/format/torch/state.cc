#include "format/torch/state.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "format/json.h"
#include "format/names.h"
#include "format/torch/pickle_values.h"
#include "format/torch/unread.h"

namespace torch_ckpt {
namespace {

// What a leaf and a key are charged beside their text. Both take more, but not
// for long: a mapping of numbers, which has them in five bytes each, is read.
constexpr size_t kBytesOfLeaf = 64;
constexpr size_t kBytesOfKey = 32;
// Nor are there more than this many and one for each two bytes, which is a
// small number in a list.
constexpr uint64_t kLeavesAnyway = uint64_t{1} << 15;
constexpr uint64_t kMostLeaves = uint64_t{1} << 21;

// A mapping that is opened: its word in a structure, and its items.
struct Mapping {
  std::string kind;
  PickleValues items;
};

std::optional<Mapping> MappingOf(const PickleValue& value) {
  if (value.Is(PickleKind::kDict)) return Mapping{"dict", value.items()};
  if (value.Is(PickleKind::kMade, PickleName::kCounter)) {
    if (value.items().size() != 1 || !value.items()[0].Is(PickleKind::kDict)) {
      return std::nullopt;
    }
    return Mapping{"counter", value.items()[0].items()};
  }
  if (!value.Is(PickleKind::kObject)) return std::nullopt;
  const PickleValues items = value.object().items.items();
  if (value.name() == PickleName::kOrderedDict) {
    if (!value.object().arguments.items().empty()) return std::nullopt;
    return Mapping{"odict", items};
  }
  if (value.name() == PickleName::kDefaultDict) {
    const auto factory = FactoryOfDefaultDict(value);
    if (!factory) return std::nullopt;
    return Mapping{"defaultdict:" + std::string(*factory), items};
  }
  return std::nullopt;
}

// Too long for a name, of which nobody looks at more.
bool IsTooLong(const PickleValue& key) {
  return key.Is(PickleKind::kString) && key.text().size() > kMaxNameBytes;
}
size_t TextBytes(const PickleValue& key) {
  return key.Is(PickleKind::kString) && !IsTooLong(key) ? key.text().size() : 0;
}

// Whether keys can be parts of names.
bool IsName(const PickleValue& key) {
  switch (key.kind()) {
    case PickleKind::kString:
      return !IsTooLong(key) && IsUtf8(key.text()) &&
             key.text().find('\0') == std::string::npos;
    case PickleKind::kInt:
    case PickleKind::kBool:
    case PickleKind::kNone:
      return true;
    default:
      return false;
  }
}

// A key as it stands in a path, and as the structure has it.
struct Key {
  std::string text;
  std::string json;
  bool is_text = false;
};

Result<Key> KeyOf(const PickleValue& value) {
  switch (value.kind()) {
    case PickleKind::kString: {
      if (IsTooLong(value)) {
        return Unsupported(
            "has a key of " + std::to_string(value.text().size()) +
            " bytes; names have at most " + std::to_string(kMaxNameBytes));
      }
      Key key{std::string(value.text()), {}, true};
      if (!IsUtf8(key.text)) return Corrupt("has a key that is no UTF-8");
      AppendJsonString(&key.json, key.text);
      return key;
    }
    case PickleKind::kInt: {
      std::string number = std::to_string(value.integer());
      return Key{number, number};
    }
    case PickleKind::kBool:
      return value.boolean() ? Key{"True", "true"} : Key{"False", "false"};
    case PickleKind::kNone:
      return Key{"None", "null"};
    default:
      return Unsupported(std::string("has a key of type ") +
                         PickleKindName(value.kind()) +
                         "; keys of state dicts that are read are text, "
                         "integers, bools or None");
  }
}

class Flattener {
 public:
  explicit Flattener(Budget* budget)
      : budget_(*budget),
        most_leaves_(
            std::min(kLeavesAnyway + budget->bytes() / 2, kMostLeaves)) {}

  Result<TorchState> Run(const PickleValue& root) {
    const bool listed = root.Is(PickleKind::kList) && root.items().size() == 1;
    const auto mapping = MappingOf(listed ? root.items()[0] : root);
    if (!mapping) {
      const std::string_view name = UnknownName(root);
      const std::string what =
          !name.empty()       ? "an object of " + std::string(name)
          : IsAnyTensor(root) ? "a tensor"
                              : std::string("a ") + PickleKindName(root.kind());
      return Unsupported("holds " + what +
                         " and no state dict: only mappings of names are read");
    }
    TC_RETURN_IF_ERROR(VisitMapping(*mapping, "", "[]").status());
    return std::move(out_);
  }

 private:
  Status Enter() {
    if (++depth_ <= kMaxNestedContainers) return {};
    return Unsupported("nests deeper than " +
                       std::to_string(kMaxNestedContainers) + " containers");
  }

  // A mapping that is opened below the root. One with other keys is a leaf.
  Result<std::optional<Mapping>> OpenedMapping(const PickleValue& value) {
    std::optional<Mapping> mapping = MappingOf(value);
    for (size_t i = 0; mapping && i < mapping->items.size(); i += 2) {
      if (!budget_.Touch(TextBytes(mapping->items[i]))) return budget_.Over();
      if (!IsName(mapping->items[i])) mapping.reset();
    }
    return mapping;
  }

  // Whether DCP's flattening goes into this list.
  Result<bool> Opens(const PickleValue& list) {
    // Too deep to be said: a leaf, which says so when it is read.
    if (depth_ == kMaxNestedContainers) return false;
    ++depth_;
    bool opens = false;
    for (const PickleValue& item : list.items()) {
      if (!budget_.Step()) return budget_.Over();
      TC_ASSIGN_OR_RETURN(const auto mapping, OpenedMapping(item));
      opens = IsAnyTensor(item) || mapping;
      if (!opens && item.Is(PickleKind::kList)) {
        TC_ASSIGN_OR_RETURN(opens, Opens(item));
      }
      if (opens) break;
    }
    --depth_;
    return opens;
  }

  // 0 and "0" are two keys, and one name.
  Status CheckKeys(const Mapping& mapping, const std::string& prefix) {
    bool texts = true;
    for (size_t i = 0; i < mapping.items.size(); i += 2) {
      texts = texts && mapping.items[i].Is(PickleKind::kString);
    }
    if (!budget_.Step(1 + mapping.items.size() / 2)) return budget_.Over();
    if (texts) return {};
    std::map<std::string, std::string> known;
    for (size_t i = 0; i < mapping.items.size(); i += 2) {
      if (!budget_.Touch(TextBytes(mapping.items[i]))) return budget_.Over();
      TC_ASSIGN_OR_RETURN(const Key key, KeyOf(mapping.items[i]));
      const auto [at, fresh] = known.try_emplace(key.text, key.json);
      if (fresh || at->second == key.json) continue;
      return Conflict("two keys of the state dict have this name")
          .WithTensor(prefix + key.text);
    }
    return {};
  }

  // Each visit says whether the container above must list its keys.
  Result<bool> VisitMapping(const Mapping& mapping, const std::string& prefix,
                            const std::string& path) {
    TC_RETURN_IF_ERROR(Enter());
    TC_RETURN_IF_ERROR(CheckKeys(mapping, prefix));
    StateContainer container{path, mapping.kind, 0, {}};
    bool listed = mapping.kind != "dict" || mapping.items.empty();
    const size_t place = out_.containers.size();
    for (size_t i = 0; i + 1 < mapping.items.size(); i += 2) {
      if (!budget_.Touch(TextBytes(mapping.items[i]))) return budget_.Over();
      TC_ASSIGN_OR_RETURN(Key key, KeyOf(mapping.items[i]));
      listed = listed || !key.is_text;
      std::string part;
      AppendJsonString(&part, key.text);
      TC_ASSIGN_OR_RETURN(
          const bool special,
          Visit(mapping.items[i + 1], prefix + key.text, part, path));
      listed = listed || special;
      if (!budget_.Keep(kBytesOfKey + key.json.size())) return budget_.Over();
      container.keys.push_back(std::move(key.json));
    }
    if (listed) {
      TC_RETURN_IF_ERROR(Keep(std::move(container), place));
    }
    --depth_;
    return mapping.items.empty();
  }
  Result<bool> VisitList(const PickleValue& list, const std::string& prefix,
                         const std::string& path) {
    TC_RETURN_IF_ERROR(Enter());
    const PickleValues items = list.items();
    const size_t place = out_.containers.size();
    bool listed = false;
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string number = std::to_string(i);
      TC_ASSIGN_OR_RETURN(const bool special,
                          Visit(items[i], prefix + number, number, path));
      listed = listed || special;
    }
    if (listed) {
      TC_RETURN_IF_ERROR(Keep({path, "list", items.size(), {}}, place));
    }
    --depth_;
    return false;
  }
  // Before those that are in it, as describe_structure has them.
  Status Keep(StateContainer container, size_t place) {
    if (!budget_.Step(1 + out_.containers.size() - place)) {
      return budget_.Over();
    }
    out_.containers.insert(
        out_.containers.begin() + static_cast<ptrdiff_t>(place),
        std::move(container));
    return {};
  }

  // What stands at `part`, JSON text, of the container at `path`.
  Result<bool> Visit(const PickleValue& value, const std::string& name,
                     const std::string& part, const std::string& path) {
    const size_t texts = name.size() + path.size() + part.size();
    if (!budget_.Touch(texts) || !budget_.Keep(kBytesOfLeaf + texts)) {
      return budget_.Over();
    }
    std::string own = path.substr(0, path.size() - 1);
    if (own.size() > 1) own += ',';
    own += part + "]";
    TC_ASSIGN_OR_RETURN(const auto mapping, OpenedMapping(value));
    if (mapping) {
      return VisitMapping(*mapping, name + ".", own);
    }
    if (value.Is(PickleKind::kList)) {
      TC_ASSIGN_OR_RETURN(const bool opens, Opens(value));
      if (opens) return VisitList(value, name + ".", own);
    }
    const Status possible = CheckTensorName(name);
    if (!possible.ok()) {
      return Unsupported("a name in the state dict: " + possible.message());
    }
    if (name == kStructureName) {
      return Unsupported("this name is reserved for torch_ckpt")
          .WithTensor(name);
    }
    if (out_.leaves.size() == most_leaves_) {
      return Exhausted("holds more than " + std::to_string(most_leaves_) +
                       " leaves, more than a pickle of " +
                       std::to_string(budget_.bytes()) +
                       " bytes can have that does not say the same in very "
                       "many places");
    }
    if (!names_.insert(name).second) {
      return Conflict("two leaves of the state dict have this name")
          .WithTensor(name);
    }
    if (depth_ == 1) own.clear();
    out_.leaves.push_back({name, std::move(own), &value});
    return false;
  }

  TorchState out_;
  std::set<std::string> names_;
  Budget& budget_;
  const size_t most_leaves_;
  int depth_ = 0;
};

}  // namespace

Result<TorchState> FlattenState(const PickleValue& root, Budget* budget) {
  return Flattener(budget).Run(root);
}

std::string StructureJson(const std::vector<StateContainer>& containers) {
  if (containers.empty()) return {};
  std::string out = "{\"version\":1,\"containers\":[";
  for (size_t i = 0; i < containers.size(); ++i) {
    const StateContainer& each = containers[i];
    if (i > 0) out += ',';
    out += '[' + each.path + ',';
    AppendJsonString(&out, each.kind);
    out += ',';
    if (each.kind == "list") {
      out += std::to_string(each.count);
    } else {
      out += '[';
      for (size_t k = 0; k < each.keys.size(); ++k) {
        if (k > 0) out += ',';
        out += each.keys[k];
      }
      out += ']';
    }
    out += ']';
  }
  return out + "],\"per_rank\":[]}";
}

}  // namespace torch_ckpt
