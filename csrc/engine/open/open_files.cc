#include "engine/open/open_files.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os/probe.h"

namespace torch_ckpt {
namespace {

// Three quarters of what this process may still open; a few even where that is
// nothing, since no job can go on without.
uint64_t MostDescriptors() {
  constexpr uint64_t kLeast = 16;
  const uint64_t free = FreeDescriptors();
  return ByteSource::OpenDescriptors() + std::max(kLeast, free - free / 4);
}

}  // namespace

OpenFiles::OpenFiles(std::shared_ptr<const FileSet> set, bool direct_io)
    : set_(std::move(set)),
      direct_io_(direct_io),
      most_(MostDescriptors()),
      states_(set_->files().size()) {}

std::shared_ptr<const ByteSource> OpenFiles::Use(FileState* state) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!state->source) return nullptr;
  recent_.splice(recent_.begin(), recent_, state->place);
  return state->source;
}

void OpenFiles::CloseSome(size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; count > 0 && !recent_.empty(); --count) {
    recent_.back()->source.reset();
    recent_.pop_back();
  }
}

Result<std::shared_ptr<const ByteSource>> OpenFiles::Open(uint32_t at) {
  FileState* const state = &states_[at];
  const FileInfo* known = state->known ? &*state->known : nullptr;
  Result<File> file = set_->OpenFile(at, known);
  if (file.status().sys_errno() == EMFILE) {
    // The rest of the process has taken what was free.
    CloseSome(SIZE_MAX);
    file = set_->OpenFile(at, known);
  }
  if (!file.ok()) return file.status();
  TC_ASSIGN_OR_RETURN(state->known, file->Stat());
  state->used = true;
  return std::make_shared<const ByteSource>(std::move(file).value(),
                                            state->known->bytes, direct_io_);
}

Result<std::shared_ptr<const ByteSource>> OpenFiles::Get(uint32_t file) {
  // Also where it is open: the one that was handed out last may have opened a
  // second descriptor since. Two, for the same reason.
  if (ByteSource::OpenDescriptors() >= most_) CloseSome(2);
  FileState* const state = &states_[file];
  if (auto source = Use(state)) return source;
  std::lock_guard<std::mutex> opening(state->opening);
  if (auto source = Use(state)) return source;  // another thread has opened it
  TC_ASSIGN_OR_RETURN(std::shared_ptr<const ByteSource> source, Open(file));
  std::lock_guard<std::mutex> lock(mutex_);
  state->source = source;
  state->place = recent_.insert(recent_.begin(), state);
  return source;
}

void OpenFiles::Forget(uint32_t file) {
  FileState* const state = &states_[file];
  std::lock_guard<std::mutex> opening(state->opening);
  state->known.reset();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!state->source) return;
  recent_.erase(state->place);
  state->source.reset();
}

Status OpenFiles::CheckUnchanged() {
  std::vector<uint32_t> opened;
  for (size_t file = 0; file < states_.size(); ++file) {
    std::lock_guard<std::mutex> opening(states_[file].opening);
    if (states_[file].used) opened.push_back(static_cast<uint32_t>(file));
  }
  return set_->CheckUnchanged(opened);
}

Status OpenFiles::Read(uint32_t file,
                       const std::function<Status(const ByteSource&)>& step) {
  bool again = false;
  return set_->UntilSure([&]() -> Status {
    if (std::exchange(again, true)) Forget(file);
    TC_ASSIGN_OR_RETURN(const auto source, Get(file));
    return step(*source);
  });
}

}  // namespace torch_ckpt
