#include "format/json.h"

#include <charconv>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/bytes.h"
#include "format/names.h"

namespace torch_ckpt {

bool JsonHandler::Fail(Status status) {
  if (status_.ok()) status_ = Locate(std::move(status));
  return false;
}
bool JsonHandler::Refuse(const char* message) { return Fail(Corrupt(message)); }

bool JsonHandler::OnKey(std::string_view) { return Refuse("unexpected key"); }
bool JsonHandler::OnString(std::string_view) {
  return Refuse("unexpected string");
}
bool JsonHandler::OnUnsigned(uint64_t) { return Refuse("unexpected number"); }
bool JsonHandler::OnOtherNumber(double) {
  return Refuse("a number is no non-negative integer");
}
bool JsonHandler::OnBool(bool) { return Refuse("unexpected true or false"); }
bool JsonHandler::OnNull() { return Refuse("unexpected null"); }
bool JsonHandler::OnBeginObject() { return Refuse("unexpected object"); }
bool JsonHandler::OnEndObject() { return Refuse("unexpected end of object"); }
bool JsonHandler::OnBeginArray() { return Refuse("unexpected array"); }
bool JsonHandler::OnEndArray() { return Refuse("unexpected end of array"); }

namespace {

// The keys of one open object, back to back.
struct Keys {
  std::string bytes;
  std::vector<size_t> ends;

  void Clear() {
    bytes.clear();
    ends.clear();
  }
  void Add(std::string_view key) {
    bytes += key;
    ends.push_back(bytes.size());
  }
};

// What nlohmann's SAX interface calls. Its strings are the lexer's buffer,
// which is not taken: it would be grown anew, step by step, for every name. It
// never throws by itself: errors of the grammar arrive at parse_error.
class Events {
 public:
  Events(int max_depth, JsonHandler* handler)
      : max_depth_(static_cast<size_t>(max_depth)), handler_(handler) {}

  bool null() { return InObject() && handler_->OnNull(); }
  bool boolean(bool value) { return InObject() && handler_->OnBool(value); }
  bool number_integer(int64_t value) {
    return InObject() && handler_->OnOtherNumber(static_cast<double>(value));
  }
  bool number_unsigned(uint64_t value) {
    return InObject() && handler_->OnUnsigned(value);
  }
  bool number_float(double value, const std::string&) {
    return InObject() && handler_->OnOtherNumber(value);
  }
  bool string(std::string& value) {
    return InObject() && handler_->OnString(value);
  }
  bool binary(nlohmann::json::binary_t&) {
    return handler_->Refuse("unexpected binary value");
  }
  bool start_object(size_t) {
    if (!Deeper()) return false;
    open_[depth_ - 1].Clear();
    return handler_->OnBeginObject();
  }
  bool key(std::string& name) {
    if (name.size() > kMaxNameBytes) {
      return handler_->Fail(Unsupported("a name has " +
                                        std::to_string(name.size()) +
                                        " bytes, more than this build reads"));
    }
    if (name.find('\0') != std::string::npos)
      return handler_->Refuse("a name holds a NUL");
    open_[depth_ - 1].Add(name);
    return handler_->OnKey(name);
  }
  bool end_object() {
    const Keys& keys = open_[depth_ - 1];
    views_.clear();
    size_t begin = 0;
    for (size_t end : keys.ends) {
      views_.push_back(std::string_view(keys.bytes).substr(begin, end - begin));
      begin = end;
    }
    if (const auto twin = FindDuplicate(views_)) {
      return handler_->Fail(Corrupt("the name '" + std::string(*twin) +
                                    "' stands twice in one object"));
    }
    --depth_;
    return handler_->OnEndObject();
  }
  bool start_array(size_t) {
    return InObject() && Deeper() && handler_->OnBeginArray();
  }
  bool end_array() {
    --depth_;
    return handler_->OnEndArray();
  }
  // The library's own text quotes the input, so it is not passed on.
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception&) {
    return handler_->Fail(
        Corrupt("not valid JSON at byte " + std::to_string(position)));
  }

 private:
  bool InObject() {
    return depth_ > 0 || handler_->Refuse("the root is not a JSON object");
  }
  bool Deeper() {
    if (depth_ == max_depth_) return handler_->Refuse("nested too deeply");
    if (open_.size() <= depth_) open_.emplace_back();
    ++depth_;
    return true;
  }

  const size_t max_depth_;
  JsonHandler* handler_;
  size_t depth_ = 0;
  std::vector<Keys> open_;  // by depth; kept for the next object there
  std::vector<std::string_view> views_;
};

}  // namespace

Status ParseJson(std::string_view text, int max_depth, JsonHandler* handler) {
  // nlohmann takes a NUL for the end of the text and skips a byte order mark.
  if (text.find('\0') != std::string_view::npos)
    return Corrupt("the JSON text holds a NUL byte");
  if (text.starts_with("\xEF\xBB\xBF"))
    return Corrupt("the JSON text starts with a byte order mark");
  Events events(max_depth, handler);
  const bool done = nlohmann::json::sax_parse(
      text.data(), text.data() + text.size(), &events,
      nlohmann::json::input_format_t::json, /*strict=*/true,
      /*ignore_comments=*/false);
  if (!handler->status().ok()) return handler->status();
  if (!done) return Corrupt("not valid JSON");
  return {};
}

void AppendJsonString(std::string* out, std::string_view text) {
  out->push_back('"');
  size_t plain = 0;  // start of the run that needs no escape
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
    out->append(text, plain, i - plain);
    plain = i + 1;
    switch (byte) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      default:
        *out += "\\u";
        AppendHex(out, byte, 4);
    }
  }
  out->append(text, plain);
  out->push_back('"');
}

std::string AsciiJson(std::string_view text) {
  std::string out;
  const auto escape = [&](uint32_t unit) {
    out += "\\u";
    AppendHex(&out, unit, 4);
  };
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80) {
      out += text[i++];
      continue;
    }
    const size_t size = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    uint32_t point = first & (0xffu >> (size + 1));
    for (size_t k = 1; k < size && i + k < text.size(); ++k) {
      point = point << 6 | (static_cast<unsigned char>(text[i + k]) & 0x3f);
    }
    i += size;
    if (point < 0x10000) {
      escape(point);
    } else {
      escape(0xd800 + ((point - 0x10000) >> 10));
      escape(0xdc00 + ((point - 0x10000) & 0x3ff));
    }
  }
  return out;
}

void AppendUnsigned(std::string* out, uint64_t value) {
  char digits[20];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out->append(digits, end);
}

void AppendJsonDims(std::string* out, const Dims& dims) {
  out->push_back('[');
  for (int d = 0; d < dims.size(); ++d) {
    if (d) out->push_back(',');
    AppendUnsigned(out, static_cast<uint64_t>(dims[d]));
  }
  out->push_back(']');
}

}  // namespace torch_ckpt
