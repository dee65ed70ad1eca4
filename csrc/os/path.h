// Paths as users give them, before there is an open directory.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt {

// What stat says of a path, without opening its parent, which need not be
// readable. nullopt where there is nothing; follows links. StatPathEntry does
// not follow the last one.
Result<std::optional<FileInfo>> StatPath(const std::string& path);
Result<std::optional<FileInfo>> StatPathEntry(const std::string& path);

// Absolute path without "." and trailing "/", not resolving links.
Result<std::string> AbsolutePath(const std::string& path);
std::string ParentPath(const std::string& absolute);
std::string BaseName(const std::string& absolute);

}  // namespace torch_ckpt
