// Strict JSON, event by event, for text that nobody vouches for; and the
// pieces of writing it.
//
// Beyond the grammar it refuses: a root that is no object, a byte order mark,
// NUL anywhere (escaped ones in keys), twin keys in one object at any level,
// keys above kMaxNameBytes, nesting beyond the caller's limit. UTF-8 is
// checked, lone surrogates included. Nothing is ever built but what the handler
// builds, so memory is bounded by the handler plus a copy of the keys.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/box.h"
#include "base/status.h"

namespace torch_ckpt {

// Receives the events of one text. Every event that is not overridden is
// refused as an unexpected value. Returning false stops the parse; call Fail
// before, and return its result.
class JsonHandler {
 public:
  virtual ~JsonHandler() = default;

  // The text is gone after the call.
  virtual bool OnKey(std::string_view key);
  virtual bool OnString(std::string_view text);
  virtual bool OnUnsigned(uint64_t value);
  // A number that is no non-negative integer of 64 bits ("-0" and "1.0" too).
  virtual bool OnOtherNumber(double value);
  virtual bool OnBool(bool value);
  virtual bool OnNull();
  virtual bool OnBeginObject();
  virtual bool OnEndObject();
  virtual bool OnBeginArray();
  virtual bool OnEndArray();

  bool Fail(Status status);          // keeps the first; returns false
  bool Refuse(const char* message);  // Fail(Corrupt(message))
  const Status& status() const { return status_; }

 protected:
  // Where the parse is, for the message of an unexpected value.
  virtual Status Locate(Status status) const { return status; }

 private:
  Status status_;
};

// kCorrupt for bad text, kUnsupported for a name beyond our limit, or what the
// handler said. `max_depth` counts the root object as 1.
Status ParseJson(std::string_view text, int max_depth, JsonHandler* handler);

// `text` in quotes, escaped. REQUIRES: UTF-8.
void AppendJsonString(std::string* out, std::string_view text);
// JSON text of UTF-8 as the same in ASCII.
std::string AsciiJson(std::string_view text);
void AppendUnsigned(std::string* out, uint64_t value);
void AppendJsonDims(std::string* out, const Dims& dims);  // REQUIRES: >= 0

}  // namespace torch_ckpt
