// Status and Result<T>: how every fallible function of the core reports.
//
// Nothing below csrc/ops throws on purpose, prints or aborts. A Status carries
// what a user needs to act: the kind, the text, and, where they are known, the
// file, the tensor and errno. Values are cheap to move and safe to copy between
// threads.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace torch_ckpt {

// The names are part of the Python API: torch_ckpt/errors.py has one class per
// kind (kIo becomes OSError). Keep both lists in step.
enum class ErrorKind : int {
  kOk = 0,
  kInvalidArgument,  // the caller asked for something that makes no sense
  kCorrupt,          // bytes on disk break the format, or a digest differs
  kIncomplete,       // a file, a tensor or a part of one is missing
  kConflict,         // overlap, a lost race, a directory that is being replaced
  kUnsupported,  // legal, but not something this build or file system can do
  kCancelled,    // the caller cancelled the job
  kIo,           // a system call failed; sys_errno() tells how
  kExhausted,    // a memory budget or a limit of ours was hit
  kInternal,     // a bug of ours
};

// "corrupt", "incomplete", ...; never null.
const char* ErrorKindName(ErrorKind kind);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(ErrorKind kind, std::string message)
      : kind_(kind), message_(std::move(message)) {}

  // A failed system call: "<operation> failed: <strerror>".
  static Status Io(int sys_errno, const std::string& operation,
                   std::string file);

  bool ok() const { return kind_ == ErrorKind::kOk; }
  ErrorKind kind() const { return kind_; }
  int sys_errno() const { return sys_errno_; }
  const std::string& message() const { return message_; }
  const std::string& file() const { return file_; }
  const std::string& tensor() const { return tensor_; }

  // Name the file or the tensor. The first, innermost name wins.
  Status WithFile(std::string file) &&;
  Status WithTensor(std::string tensor) &&;

  // One line for people: "<file>: tensor '<fqn>': <message>".
  std::string ToString() const;

 private:
  ErrorKind kind_ = ErrorKind::kOk;
  int sys_errno_ = 0;
  std::string message_, file_, tensor_;
};

inline Status InvalidArgument(std::string m) {
  return {ErrorKind::kInvalidArgument, std::move(m)};
}
inline Status Corrupt(std::string m) {
  return {ErrorKind::kCorrupt, std::move(m)};
}
inline Status Incomplete(std::string m) {
  return {ErrorKind::kIncomplete, std::move(m)};
}
inline Status Conflict(std::string m) {
  return {ErrorKind::kConflict, std::move(m)};
}
inline Status Unsupported(std::string m) {
  return {ErrorKind::kUnsupported, std::move(m)};
}
inline Status Cancelled(std::string m) {
  return {ErrorKind::kCancelled, std::move(m)};
}
inline Status Exhausted(std::string m) {
  return {ErrorKind::kExhausted, std::move(m)};
}
inline Status Internal(std::string m) {
  return {ErrorKind::kInternal, std::move(m)};
}

// A T or the Status that says why there is none: kInternal in place of an ok
// one. value() on an error is a bug.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Status status)
      : state_(std::in_place_index<1>,
               status.ok() ? Internal("there is neither a result nor an error")
                           : std::move(status)) {}

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

#define TC_CONCAT_INNER(a, b) a##b
#define TC_CONCAT(a, b) TC_CONCAT_INNER(a, b)

#define TC_RETURN_IF_ERROR(expr)              \
  do {                                        \
    ::torch_ckpt::Status tc_status_ = (expr); \
    if (!tc_status_.ok()) return tc_status_;  \
  } while (0)

#define TC_ASSIGN_OR_RETURN(lhs, expr) \
  TC_ASSIGN_OR_RETURN_IMPL(TC_CONCAT(tc_result_, __LINE__), lhs, expr)
#define TC_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                             \
  if (!result.ok()) return result.status();         \
  lhs = std::move(result).value()

}  // namespace torch_ckpt
