#include "json/fields.h"

#include <algorithm>
#include <limits>

namespace torch_ckpt {
namespace {

// The error of a field that is not there, or not what it should be.
Status Wrong(const Json& object, const std::string& field, const char* type) {
  const auto it = object.find(field);
  const bool missing = it == object.end() || it->is_null();
  return InvalidArgument(
      "'" + field + (missing ? "' is missing; it is " : "' is not ") + type);
}

constexpr char kString[] = "a string", kInteger[] = "an integer",
               kBool[] = "true or false", kList[] = "a list",
               kObject[] = "an object",
               kNames[] = "a list of names, or one text with a name a line";

// As torch_ckpt/options.py says it.
bool IsUrl(std::string_view path) {
  const size_t colon = path.find(":/");
  if (colon == std::string_view::npos || colon == 0) return false;
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  return letter(path[0]) &&
         std::all_of(path.begin(), path.begin() + static_cast<ptrdiff_t>(colon),
                     [&](char c) {
                       return letter(c) || (c >= '0' && c <= '9') || c == '+' ||
                              c == '.' || c == '-';
                     });
}

// What `value` should be, in words; null where it is that.
const char* Breach(const Json& value, FieldType type) {
  switch (type) {
    case FieldType::kString:
      return value.is_string() ? nullptr : kString;
    case FieldType::kInteger:
      return value.is_number_integer() ? nullptr : kInteger;
    case FieldType::kBool:
      return value.is_boolean() ? nullptr : kBool;
    case FieldType::kList:
      return value.is_array() ? nullptr : kList;
    case FieldType::kObject:
      return value.is_object() ? nullptr : kObject;
    case FieldType::kNames:
      return value.is_string() || value.is_array() ? nullptr : kNames;
  }
  return nullptr;
}

// Whether more lists and objects than that are in each other.
bool NestsDeeper(std::string_view text, int most) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > most) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace

Result<Json> ParseObject(std::string_view text, const char* what) {
  constexpr int kMaxNesting = 64;
  if (NestsDeeper(text, kMaxNesting)) {
    return InvalidArgument(std::string("the ") + what +
                           " is nested deeper than " +
                           std::to_string(kMaxNesting) + " levels");
  }
  Json parsed = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_object()) return parsed;
  return InvalidArgument(std::string("the ") + what + " is not a JSON object");
}

Status CheckFields(const Json& object, const std::string& what,
                   std::span<const Field> fields) {
  for (const auto& item : object.items()) {
    const std::string& name = item.key();
    const Json& value = item.value();
    const auto field =
        std::find_if(fields.begin(), fields.end(),
                     [&](const Field& known) { return known.name == name; });
    if (field == fields.end()) {
      std::string known;
      for (const Field& each : fields) {
        known += (known.empty() ? "'" : ", '") + std::string(each.name) + "'";
      }
      return InvalidArgument(what + " has no '" + name + "'; it has " + known);
    }
    if (!value.is_null() && Breach(value, field->type) != nullptr) {
      return Wrong(object, name, Breach(value, field->type));
    }
  }
  return {};
}

Result<std::string> GetString(const Json& object, const char* field) {
  const auto it = object.find(field);
  if (it == object.end() || !it->is_string())
    return Wrong(object, field, kString);
  return it->get<std::string>();
}

Result<std::string> GetPath(const Json& object, const char* field) {
  TC_ASSIGN_OR_RETURN(std::string path, GetString(object, field));
  if (IsUrl(path)) {
    return InvalidArgument("'" + std::string(field) + "' is a URL, " + path +
                           ": mount it or copy the checkpoint");
  }
  return path;
}

Result<int64_t> GetInt(const Json& object, const char* field,
                       std::optional<int64_t> otherwise) {
  const auto it = object.find(field);
  if (it != object.end() && it->is_number_integer()) {
    if (it->is_number_unsigned() &&
        it->get<uint64_t>() > std::numeric_limits<int64_t>::max()) {
      return InvalidArgument("'" + std::string(field) + "' is too large");
    }
    return it->get<int64_t>();
  }
  if (otherwise && (it == object.end() || it->is_null())) return *otherwise;
  return Wrong(object, field, kInteger);
}

Result<const Json*> GetList(const Json& object, const char* field) {
  static const Json* empty = new Json(Json::array());
  const auto it = object.find(field);
  if (it == object.end() || it->is_null()) return empty;
  if (!it->is_array()) return Wrong(object, field, kList);
  return &*it;
}

Result<std::vector<std::string>> GetNames(const Json& object,
                                          const char* field) {
  std::vector<std::string> names;
  const auto it = object.find(field);
  if (it == object.end() || it->is_null()) return names;
  if (it->is_string()) {
    const auto& text = it->get_ref<const std::string&>();
    const auto breaks = std::count(text.begin(), text.end(), '\n');
    names.reserve(static_cast<size_t>(breaks) + 1);
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      names.emplace_back(text, begin, end - begin);
      begin = end + 1;
    }
    return names;
  }
  if (!it->is_array()) return Wrong(object, field, kNames);
  names.reserve(it->size());
  for (const Json& name : *it) {
    if (!name.is_string()) return Wrong(object, field, kNames);
    names.push_back(name.get<std::string>());
  }
  return names;
}

bool GetBool(const Json& object, const char* field, bool otherwise) {
  const auto it = object.find(field);
  return it != object.end() && it->is_boolean() ? it->get<bool>() : otherwise;
}

Result<std::optional<Dims>> GetDimsAt(const Json& object, const char* field,
                                      size_t i) {
  const auto it = object.find(field);
  if (it == object.end() || it->is_null()) return std::optional<Dims>();
  if (!it->is_array() || i >= it->size()) {
    return InvalidArgument(std::string("'") + field + "' is too short");
  }
  const Json& item = (*it)[i];
  if (item.is_null()) return std::optional<Dims>();
  const Result<Dims> dims = ParseDims(item);
  if (dims.ok()) return std::optional<Dims>(*dims);
  return Status(dims.status().kind(), std::string("'") + field + "', entry " +
                                          std::to_string(i) + ": " +
                                          dims.status().message());
}

Result<uint64_t> ParseUnsigned(const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  return InvalidArgument("a number of bytes is an integer of 0 or more");
}

Result<Dims> ParseDims(const Json& value) {
  if (!value.is_array() || value.size() > kMaxDims) {
    return Unsupported("a shape is a list of at most " +
                       std::to_string(kMaxDims) + " integers");
  }
  Dims dims;
  for (const Json& item : value) {
    if (!item.is_number_integer()) {
      return InvalidArgument("a shape holds integers only");
    }
    dims.push_back(item.get<int64_t>());
  }
  return dims;
}

Json DimsJson(const Dims& dims) {
  Json out = Json::array();
  for (int64_t d : dims) out.push_back(d);
  return out;
}

Json ErrorJson(const Status& status) {
  return {{"error",
           {{"kind", ErrorKindName(status.kind())},
            {"message", status.message()},
            {"errno", status.sys_errno()},
            {"file", status.file()},
            {"tensor", status.tensor()}}}};
}

Result<Dtype> ParseDtype(const Json& dtype, const std::string& name) {
  if (dtype.is_string()) {
    const auto& text = dtype.get_ref<const std::string&>();
    if (const auto known = DtypeFromName(text)) return *known;
    return Unsupported("safetensors cannot hold the dtype " + text)
        .WithTensor(name);
  }
  return InvalidArgument("a dtype is text").WithTensor(name);
}

std::string DigestsText(const std::vector<uint32_t>& crc32c) {
  std::string text;
  text.reserve(crc32c.size() * 8);
  for (const uint32_t crc : crc32c) AppendHex(&text, crc, 8);
  return text;
}

Result<std::vector<uint32_t>> ParseDigests(const std::string& hex) {
  if (hex.size() % 8 != 0) return InvalidArgument("a digest is cut short");
  std::vector<uint32_t> crc32c;
  crc32c.reserve(hex.size() / 8);
  for (size_t i = 0; i < hex.size(); i += 8) {
    const auto crc = ParseHex(std::string_view(hex).substr(i, 8));
    if (!crc) return InvalidArgument("a digest is not hexadecimal");
    crc32c.push_back(static_cast<uint32_t>(*crc));
  }
  return crc32c;
}

Result<FileRole> GetRole(const Json& object) {
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(object, "role"));
  if (const auto role = RoleFromName(name)) return *role;
  return InvalidArgument("unknown file role '" + name + "'");
}

Json NamesJson(const std::vector<std::string_view>& names) {
  if (names.empty()) return Json::array();
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i].find('\n') != std::string_view::npos) return names;
    if (i > 0) text += '\n';
    text += names[i];
  }
  return text;
}

}  // namespace torch_ckpt
