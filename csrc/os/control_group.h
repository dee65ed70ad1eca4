// The memory that control groups (containers, batch jobs) leave this process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ckpt {

// The bytes that may still be touched before a control group of this process is
// at its limit, where the kernel kills instead of refusing. Too many rather
// than too few: what files have in the page cache counts as free. nullopt where
// nothing limits it, where there is swap, and where the kernel does not say.
// `root` is before the paths of the system's files, for tests. Any thread.
std::optional<uint64_t> ControlGroupRoom(const std::string& root = {});

}  // namespace torch_ckpt
