// Fields of the JSON that Python sends, as the engine's types, and back.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"
#include "format/ours/manifest.h"

namespace torch_ckpt {

using Json = nlohmann::json;

// `text` as an object; kInvalidArgument where `what` is none, or holds more
// than 64 lists and objects in each other: what writes JSON calls itself.
Result<Json> ParseObject(std::string_view text, const char* what);

// The fields that an object may have, and what they hold. Null is as good as
// absent.
enum class FieldType { kString, kInteger, kBool, kList, kObject, kNames };
struct Field {
  std::string_view name;
  FieldType type;
};
// kInvalidArgument names a field of `object` that `fields` lacks, or that holds
// anything else. `what` is what the object is, in words.
Status CheckFields(const Json& object, const std::string& what,
                   std::span<const Field> fields);

// A field of an object. kInvalidArgument names the field.
Result<std::string> GetString(const Json& object, const char* field);
// The path of a file or directory; kInvalidArgument for a URL, which would be a
// directory "s3:" here.
Result<std::string> GetPath(const Json& object, const char* field);
Result<int64_t> GetInt(const Json& object, const char* field,
                       std::optional<int64_t> otherwise = std::nullopt);
bool GetBool(const Json& object, const char* field, bool otherwise);
// A list, or an empty one where it is absent or null. Lives as long as the
// object.
Result<const Json*> GetList(const Json& object, const char* field);
// Names: a list of them, or one text with a name a line, which is much cheaper
// to parse. None where it is absent or null.
Result<std::vector<std::string>> GetNames(const Json& object,
                                          const char* field);
// As GetNames reads them: one text with a name a line, where that can be.
Json NamesJson(const std::vector<std::string_view>& names);
// Element `i` of a list of shapes; nullopt when the list or the element is
// null.
Result<std::optional<Dims>> GetDimsAt(const Json& object, const char* field,
                                      size_t i);
// Of "role".
Result<FileRole> GetRole(const Json& object);

// Values.
Result<uint64_t> ParseUnsigned(const Json& value);
Result<Dims> ParseDims(const Json& value);
Json DimsJson(const Dims& dims);
// The dtype of tensor `name`, by what safetensors calls it.
Result<Dtype> ParseDtype(const Json& value, const std::string& name);
Result<std::vector<uint32_t>> ParseDigests(const std::string& hex);
std::string DigestsText(const std::vector<uint32_t>& crc32c);
// {"error": {"kind", "message", "errno", "file", "tensor"}}
Json ErrorJson(const Status& status);

}  // namespace torch_ckpt
