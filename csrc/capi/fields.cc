#include <algorithm>
#include <optional>

#include "capi/requests.h"

namespace torch_ckpt::capi {
namespace {

Status Missing(const char* field, const char* type) {
  return InvalidArgument(std::string("the request needs '") + field + "' (" +
                         type + ")");
}

}  // namespace

Result<std::string> GetString(const Json& request, const char* field) {
  const auto it = request.find(field);
  if (it == request.end() || !it->is_string()) return Missing(field, "string");
  return it->get<std::string>();
}

Result<int64_t> GetInt(const Json& request, const char* field,
                       std::optional<int64_t> otherwise) {
  const auto it = request.find(field);
  if (it != request.end() && it->is_number_integer()) {
    return it->get<int64_t>();
  }
  if (otherwise && (it == request.end() || it->is_null())) return *otherwise;
  return Missing(field, "integer");
}

Result<const Json*> GetList(const Json& request, const char* field) {
  static const Json* empty = new Json(Json::array());
  const auto it = request.find(field);
  if (it == request.end() || it->is_null()) return empty;
  if (!it->is_array()) return Missing(field, "list");
  return &*it;
}

Result<std::vector<std::string>> GetNames(const Json& request,
                                          const char* field) {
  std::vector<std::string> names;
  const auto it = request.find(field);
  if (it == request.end() || it->is_null()) return names;
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
  if (!it->is_array()) return Missing(field, "names");
  names.reserve(it->size());
  for (const Json& name : *it) {
    if (!name.is_string()) return Missing(field, "names");
    names.push_back(name.get<std::string>());
  }
  return names;
}

bool GetBool(const Json& request, const char* field, bool otherwise) {
  const auto it = request.find(field);
  return it != request.end() && it->is_boolean() ? it->get<bool>() : otherwise;
}

Result<Dims> GetDims(const Json& value) {
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

OutputOptions OutputOptionsOf(const Json& request) {
  OutputOptions options;
  options.workers =
      static_cast<int>(GetInt(request, "workers", options.workers).ok()
                           ? *GetInt(request, "workers", options.workers)
                           : options.workers);
  options.sync = GetBool(request, "sync", true);
  options.direct_io = GetBool(request, "direct_io", true);
  return options;
}

Result<FileNaming> FileNamingOf(const Json& request) {
  FileNaming naming;
  TC_ASSIGN_OR_RETURN(naming.stem, GetString(request, "stem"));
  naming.number_single = GetBool(request, "number_single", true);
  return naming;
}

Result<Dtype> DtypeOf(const Json& dtype, const std::string& name) {
  if (dtype.is_string()) {
    const auto& text = dtype.get_ref<const std::string&>();
    if (const auto known = DtypeFromName(text)) return *known;
    return Unsupported("safetensors cannot hold the dtype " + text)
        .WithTensor(name);
  }
  return InvalidArgument("a dtype is text").WithTensor(name);
}

Result<FileRule> FileRuleOf(const Json& request) {
  FileRule rule;
  TC_ASSIGN_OR_RETURN(const int64_t max_bytes, GetInt(request, "max_bytes", 0));
  if (max_bytes < 0) return InvalidArgument("'max_bytes' is negative");
  rule.max_bytes = static_cast<uint64_t>(max_bytes);
  const auto mapping = request.find("mapping");
  if (mapping == request.end() || !mapping->is_object()) return rule;
  rule.mapping.emplace();
  for (const auto& [name, index] : mapping->items()) {
    if (!index.is_number_integer()) {
      return InvalidArgument("the mapping holds file indices").WithTensor(name);
    }
    rule.mapping->emplace_back(name, index.get<int64_t>());
  }
  return rule;
}

std::string CrcHex(const std::vector<uint32_t>& crc32c) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(crc32c.size() * 8);
  for (uint32_t crc : crc32c) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      text += kDigits[(crc >> shift) & 15];
    }
  }
  return text;
}

Result<std::vector<uint32_t>> ParseCrcHex(const std::string& text) {
  if (text.size() % 8 != 0) return InvalidArgument("a digest is cut short");
  std::vector<uint32_t> crc32c(text.size() / 8, 0);
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    uint32_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint32_t>(c - 'a' + 10);
    } else {
      return InvalidArgument("a digest is not hexadecimal");
    }
    crc32c[i / 8] = crc32c[i / 8] << 4 | digit;
  }
  return crc32c;
}

Json WrittenJson(const std::vector<WrittenRange>& ranges) {
  Json out = Json::array();
  for (const WrittenRange& range : ranges) {
    out.push_back({range.bytes.begin, range.bytes.end, CrcHex(range.crc32c)});
  }
  return out;
}

Result<std::vector<WrittenRange>> ParseWritten(const Json& ranges) {
  std::vector<WrittenRange> written;
  for (const Json& item : ranges) {
    if (!item.is_array() || item.size() != 3 || !item[0].is_number_unsigned() ||
        !item[1].is_number_unsigned() || !item[2].is_string()) {
      return InvalidArgument("what was written is said as begin, end, digests");
    }
    WrittenRange range{{item[0].get<uint64_t>(), item[1].get<uint64_t>()}, {}};
    TC_ASSIGN_OR_RETURN(range.crc32c, ParseCrcHex(item[2].get<std::string>()));
    written.push_back(std::move(range));
  }
  return written;
}

Result<FileRole> GetRole(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "role"));
  if (const auto role = RoleFromName(name)) return *role;
  return InvalidArgument("unknown file role '" + name + "'");
}

}  // namespace torch_ckpt::capi
