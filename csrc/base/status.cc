#include "base/status.h"

#include <cstring>

namespace torch_ckpt {

const char* ErrorKindName(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kOk:
      return "ok";
    case ErrorKind::kInvalidArgument:
      return "invalid_argument";
    case ErrorKind::kCorrupt:
      return "corrupt";
    case ErrorKind::kIncomplete:
      return "incomplete";
    case ErrorKind::kConflict:
      return "conflict";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kCancelled:
      return "cancelled";
    case ErrorKind::kIo:
      return "io";
    case ErrorKind::kExhausted:
      return "exhausted";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "internal";
}

Status Status::Io(int sys_errno, const std::string& operation,
                  std::string file) {
  // The GNU form: thread-safe, and may return a static text.
  char buffer[128];
  const char* text = strerror_r(sys_errno, buffer, sizeof buffer);
  Status status(ErrorKind::kIo, operation + " failed: " + text + " [errno " +
                                    std::to_string(sys_errno) + "]");
  status.sys_errno_ = sys_errno;
  status.file_ = std::move(file);
  return status;
}

Status Status::WithFile(std::string file) && {
  if (!ok() && file_.empty()) file_ = std::move(file);
  return std::move(*this);
}

Status Status::WithTensor(std::string tensor) && {
  if (!ok() && tensor_.empty()) tensor_ = std::move(tensor);
  return std::move(*this);
}

std::string Status::ToString() const {
  if (ok()) return "ok";
  std::string text;
  if (!file_.empty()) text += file_ + ": ";
  if (!tensor_.empty()) text += "tensor '" + tensor_ + "': ";
  return text + message_;
}

}  // namespace torch_ckpt
