#include "interleaver.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <utility>

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

constexpr std::string_view kDecisive[] = {"/committed", "/commit.json",
                                          "/torch_ckpt.json", "/save_id"};

thread_local int this_actor = -1;

bool IsOneOf(std::string_view op, std::initializer_list<std::string_view> ops) {
  return std::find(ops.begin(), ops.end(), op) != ops.end();
}

}  // namespace

bool Interleaver::Counts(const FaultSite& site) const {
  if (!site.path.starts_with(root_)) return false;
  if (IsOneOf(site.op, {"mkdirat", "renameat", "renameat2", "linkat",
                        "unlinkat", "rmdir", "getdents"})) {
    return true;
  }
  if (IsOneOf(site.op, {"openat", "fstatat"})) {
    return fine_ || std::any_of(std::begin(kDecisive), std::end(kDecisive),
                                [&](std::string_view name) {
                                  return site.path.ends_with(name);
                                });
  }
  return fine_ &&
         IsOneOf(site.op, {"flock", "ofd_lock", "ofd_getlk", "pwrite"});
}

std::string Interleaver::Line(const FaultSite& site) const {
  const auto below = [&](const std::string& path) {
    return path.substr(std::min(path.size(), root_.size()));
  };
  std::string line = std::string(site.op) + " " + below(site.path);
  if (!site.path2.empty()) line += " -> " + below(site.path2);
  return line;
}

bool Interleaver::EndsTurn(const FaultSite& site, Actor* self) const {
  if (!Counts(site)) return false;
  if (self->left-- <= 0) return true;
  if (self->before.empty()) return false;
  if (Line(site).find(self->before) == std::string::npos) return false;
  self->before.clear();
  return true;
}

FaultAction Interleaver::Visit(const FaultSite& site) {
  const std::string_view op = site.op;
  Actor& self = *actors_[Index(running_)];
  if (this_actor >= 0) {
    const bool waits = op == "sleep";
    if (waits) self.waits = true;
    if (!self.dead && (waits || EndsTurn(site, &self))) {
      back_.release();
      self.go.acquire();
    }
    self.waits = false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (op == "sleep") return {.skip = true};
  if (self.dead) return {.sys_errno = EIO};
  if (Counts(site)) {
    ++total_;
    if (this_actor >= 0) ++self.calls;
    trace_ += "  " + std::to_string(running_) + " " + Line(site) + "\n";
  }
  if (!world_.locks && IsOneOf(op, {"flock", "ofd_lock", "ofd_getlk"})) {
    return {.skip = true};
  }
  if (!world_.rename_flags && op == "renameat2") return {.sys_errno = EINVAL};
  const bool full = world_.full_after >= 0 && total_ > world_.full_after;
  if (full && IsOneOf(op, {"pwrite", "mkdirat", "linkat", "fallocate"})) {
    return {.sys_errno = ENOSPC};
  }
  return {};
}

void Interleaver::Let(const Turn& turn) {
  Actor& self = *actors_[Index(turn.actor)];
  self.before = turn.before;
  if (self.ended) return;
  running_ = turn.actor;
  self.left = turn.calls;
  self.go.release();
  back_.acquire();
}

void Interleaver::Run(const World& world, const std::vector<Turn>& turns,
                      std::vector<std::function<void()>> actors) {
  world_ = world;
  actors_.clear();
  trace_.clear();
  missed_.clear();
  total_ = 0;
  SetFaultHook([this](const FaultSite& site) { return Visit(site); });
  for (size_t a = 0; a < actors.size(); ++a) {
    actors_.push_back(std::make_unique<Actor>());
    Actor* const self = actors_.back().get();
    self->thread = std::thread([this, self, a, act = std::move(actors[a])] {
      this_actor = static_cast<int>(a);
      self->go.acquire();
      act();
      self->ended = true;
      back_.release();
    });
  }
  for (const Turn& turn : turns) {
    Actor& self = *actors_[Index(turn.actor)];
    Let(turn);
    if (!self.before.empty()) missed_ += self.before + "; ";
    if (!turn.dies || self.ended) continue;
    self.dead = true;
    Let({turn.actor});
  }
  const auto all_ended = [&] {
    return std::all_of(actors_.begin(), actors_.end(),
                       [](const auto& actor) { return actor->ended; });
  };
  while (!all_ended()) {
    for (size_t a = 0; a < actors_.size(); ++a) {
      Let({static_cast<int>(a)});
    }
  }
  for (const auto& actor : actors_) actor->thread.join();
  SetFaultHook(nullptr);
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
