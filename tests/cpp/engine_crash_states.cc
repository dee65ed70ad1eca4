#include "engine_crash_states.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "engine_test_util.h"
#include "os/fault.h"
#include "os/lock.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt::crash {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlock = 4096;
constexpr size_t kExhaustive = 6;  // undecided operations: 64 subsets
constexpr int kSamples = 24;

}  // namespace

Recorder::Recorder(std::string root) : root_(std::move(root)) {
  Look(&tree_, &contents_);
  first_tree_ = tree_;
  first_contents_ = contents_;
  SetFaultHook([this](const FaultSite& site) {
    std::lock_guard<std::mutex> lock(mutex_);
    Settle();
    if (kill_at_ && kill_at_(site)) killed_ = true;
    if (killed_) return FaultAction{.sys_errno = EIO};
    if (std::string(site.op) == "fsync") syncing_ = Resolve(site.path);
    return FaultAction();
  });
}

void Recorder::Stop() {
  SetFaultHook(nullptr);
  Settle();
}

void Recorder::KillAt(std::function<bool(const FaultSite&)> last) {
  std::lock_guard<std::mutex> lock(mutex_);
  kill_at_ = std::move(last);
}

bool Recorder::Revive() {
  std::lock_guard<std::mutex> lock(mutex_);
  kill_at_ = nullptr;
  return std::exchange(killed_, false);
}

Id Recorder::Resolve(const std::string& path) {
  const auto known = by_path_.find(path);
  if (known != by_path_.end() && IsDirectory(known->second)) {
    return known->second;
  }
  const fs::path parts(path);
  const auto parent = by_path_.find(parts.parent_path().string());
  if (parent == by_path_.end()) return -1;
  const auto entry = tree_.find({parent->second, parts.filename().string()});
  return entry == tree_.end() ? -1 : entry->second;
}

void Recorder::Settle() {
  if (syncing_ >= 0) {
    Op op;
    op.kind = IsDirectory(syncing_) ? Op::kSyncDirectory : Op::kSyncFile;
    op.id = syncing_;
    ops_.push_back(std::move(op));
    syncing_ = -1;
  }
  Tree tree;
  std::map<Id, std::string> contents;
  Look(&tree, &contents);
  Op names;
  for (const auto& entry : tree_) {
    const auto it = tree.find(entry.first);
    if (it == tree.end() || it->second != entry.second) {
      names.removed.push_back(entry);
    }
  }
  for (const auto& entry : tree) {
    const auto it = tree_.find(entry.first);
    if (it == tree_.end() || it->second != entry.second) {
      names.added.push_back(entry);
    }
  }
  if (!names.removed.empty() || !names.added.empty()) {
    ops_.push_back(std::move(names));
  }
  for (const auto& [id, content] : contents) {
    const auto it = contents_.find(id);
    if (it == contents_.end() ? content.empty() : it->second == content) {
      continue;
    }
    Op data;
    data.kind = Op::kData;
    data.id = id;
    data.content = content;
    ops_.push_back(std::move(data));
  }
  tree_ = std::move(tree);
  contents_ = std::move(contents);
}

void Recorder::Look(Tree* tree, std::map<Id, std::string>* contents) {
  std::map<uint64_t, Id> seen;
  by_path_[root_] = kRoot;
  directories_.insert(kRoot);
  Visit(root_, kRoot, tree, contents, &seen);
  ids_ = std::move(seen);  // an inode that is gone may come back as another
}

void Recorder::Visit(const std::string& path, Id directory, Tree* tree,
                     std::map<Id, std::string>* contents,
                     std::map<uint64_t, Id>* seen) {
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(path, gone)) {
    struct stat info;
    ASSERT_EQ(lstat(entry.path().c_str(), &info), 0);
    const auto known = ids_.find(info.st_ino);
    const Id id = known == ids_.end() ? next_++ : known->second;
    (*seen)[info.st_ino] = id;
    (*tree)[{directory, entry.path().filename().string()}] = id;
    by_path_[entry.path().string()] = id;
    if (S_ISDIR(info.st_mode)) {
      directories_.insert(id);
      Visit(entry.path().string(), id, tree, contents, seen);
    } else {
      // What the file of a lock says means nothing to who can lock it.
      const bool lock = entry.path().filename() == kLockFileName;
      (*contents)[id] = lock ? "" : ReadText(entry.path().string());
    }
  }
}

CrashStates::CrashStates(const Recorder& recorder, size_t prefix)
    : recorder_(recorder), prefix_(prefix) {
  const std::vector<Op>& ops = recorder.ops();
  for (size_t i = 0; i < prefix; ++i) {
    if (ops[i].kind == Op::kNames && !Durable(i)) open_.push_back(i);
  }
  synced_ = latest_ = recorder.first_contents();
  for (size_t i = 0; i < prefix; ++i) {
    const Op& op = ops[i];
    if (op.kind == Op::kData) latest_[op.id] = op.content;
    if (op.kind == Op::kSyncFile) synced_[op.id] = latest_[op.id];
  }
}

void CrashStates::ForEach(
    const std::string& path, std::set<std::string>* done,
    const std::function<void(const std::string&)>& check) {
  std::mt19937 random(static_cast<uint32_t>(prefix_));
  for (const std::set<size_t>& lost : Choices(&random)) {
    const Tree tree = Names(lost);
    for (int variant = 0; variant < 4; ++variant) {
      std::map<std::string, std::string> files;
      bool undecided = false;
      Collect(tree, kRoot, "", variant, &random, &files, &undecided);
      std::string key;
      for (const auto& [name, text] : files) key += name + "\n" + text;
      if (done->insert(std::move(key)).second &&
          done->size() % kOneInSanitized == 1 % kOneInSanitized) {
        Materialise(path, files);
        // Nobody is about to change what is there: there is nothing to wait
        // for.
        SetFaultHook([](const FaultSite& site) -> FaultAction {
          return {.skip = std::string_view(site.op) == "sleep"};
        });
        check(path);
        SetFaultHook(nullptr);
        fs::remove_all(path);
      }
      if (!undecided) break;
    }
  }
}

bool CrashStates::Durable(size_t i) const {
  const std::vector<Op>& ops = recorder_.ops();
  std::set<Id> directories;
  for (const auto& entry : ops[i].removed) {
    directories.insert(entry.first.first);
  }
  for (const auto& entry : ops[i].added) {
    directories.insert(entry.first.first);
  }
  for (size_t j = i + 1; j < prefix_; ++j) {
    if (ops[j].kind == Op::kSyncDirectory) directories.erase(ops[j].id);
  }
  return directories.empty();
}

std::vector<std::set<size_t>> CrashStates::Choices(std::mt19937* random) const {
  std::vector<std::set<size_t>> choices;
  const size_t n = open_.size();
  const auto choose = [&](const std::function<bool(size_t)>& loses) {
    std::set<size_t> lost;
    for (size_t i = 0; i < n; ++i) {
      if (loses(i)) lost.insert(open_[i]);
    }
    choices.push_back(std::move(lost));
  };
  if (n <= kExhaustive) {
    for (size_t bits = 0; bits < size_t{1} << n; ++bits) {
      choose([&](size_t i) { return (bits >> i & 1) != 0; });
    }
    return choices;
  }
  for (size_t at = 0; at <= n; ++at) {
    choose([&](size_t i) { return i >= at; });  // in order
    choose([&](size_t i) { return i == at; });
    choose([&](size_t i) { return i != at; });
  }
  for (int s = 0; s < kSamples; ++s) {
    choose([&](size_t) { return (*random)() % 2 == 0; });
  }
  return choices;
}

Tree CrashStates::Names(const std::set<size_t>& lost) const {
  Tree tree = recorder_.first_tree();
  for (size_t i = 0; i < prefix_; ++i) {
    const Op& op = recorder_.ops()[i];
    if (op.kind != Op::kNames || lost.contains(i)) continue;
    for (const auto& [name, id] : op.removed) {
      const auto it = tree.find(name);
      if (it != tree.end() && it->second == id) tree.erase(it);
    }
    for (const auto& [name, id] : op.added) tree[name] = id;
  }
  return tree;
}

void CrashStates::Collect(const Tree& tree, Id directory,
                          const std::string& prefix, int variant,
                          std::mt19937* random,
                          std::map<std::string, std::string>* files,
                          bool* undecided) const {
  for (auto it = tree.lower_bound({directory, ""});
       it != tree.end() && it->first.first == directory; ++it) {
    const std::string path = prefix + it->first.second;
    if (recorder_.IsDirectory(it->second)) {
      (*files)[path + "/"];
      Collect(tree, it->second, path + "/", variant, random, files, undecided);
    } else {
      (*files)[path] = Content(it->second, variant, random, undecided);
    }
  }
}

std::string CrashStates::Content(Id id, int variant, std::mt19937* random,
                                 bool* undecided) const {
  const auto find = [id](const std::map<Id, std::string>& in) {
    const auto it = in.find(id);
    return it == in.end() ? std::string() : it->second;
  };
  const std::string synced = find(synced_), latest = find(latest_);
  if (synced == latest) return latest;
  *undecided = true;
  if (variant == 0) return latest;
  if (variant == 1) return synced;
  std::string torn(latest.size(), '\0');
  if (variant == 2) return torn;
  for (size_t at = 0; at < torn.size(); at += kBlock) {
    const size_t size = std::min(kBlock, torn.size() - at);
    if ((*random)() % 2 == 0) torn.replace(at, size, latest, at, size);
  }
  return torn;
}

void CrashStates::Materialise(const std::string& path,
                              const std::map<std::string, std::string>& files) {
  fs::create_directories(path);
  for (const auto& [name, text] : files) {  // parents sort before children
    if (name.ends_with('/')) {
      fs::create_directory(path + "/" + name);
    } else {
      WriteText(path + "/" + name, text);
    }
  }
}

}  // namespace torch_ckpt::crash

#endif  // TORCH_CKPT_FAULTS
