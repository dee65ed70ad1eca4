// What a crash of the machine at any moment of a save may leave on disk, and
// that all of it is the old checkpoint or the new one.
//
// A save is recorded: after each system call the tree is compared with what it
// was before, which gives the operations that took effect. For every prefix of
// them the states are built that a crash could leave, under this model:
//
//  1. Names. An operation on names (create, unlink, mkdir, rmdir, rename) is
//     durable once every directory whose entries it changed was synced after
//     it. Until then it may be lost or kept, whatever becomes of others: names
//     of one directory may persist out of order. A single operation is never
//     half done: rename is atomic, also between two directories.
//  2. Data. Bytes of a file are durable once the file was synced after they
//     were written. Until then a file that has a name may hold what was last
//     synced (nothing, for a new one), what was written, zeros of its length,
//     or any mixture by blocks of 4 KiB; syncing a file says nothing about its
//     name, and the other way round.
//  3. What was there before the save began is durable.
//
// This is weaker than ext4, XFS and Btrfs promise (they commit names in order),
// so what holds here holds there. Small sets of undecided operations are tried
// exhaustively, larger ones by all single and prefix choices and a sample.
#include <algorithm>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <tuple>

#include "engine/parts.h"
#include "engine_test_util.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

using Id = int;  // of a file or directory, whatever its names are
using Name = std::pair<Id, std::string>;
using Tree = std::map<Name, Id>;

constexpr Id kRoot = 0;
constexpr size_t kBlock = 4096;
constexpr size_t kExhaustive = 6;  // undecided operations: 64 subsets
constexpr int kSamples = 24;

struct Op {
  enum Kind { kNames, kData, kSyncFile, kSyncDirectory };
  Kind kind = kNames;
  std::vector<std::pair<Name, Id>> removed, added;  // kNames
  Id id = kRoot;                                    // the others
  std::string content;                              // kData: of the whole file
};

// Watches the tree under `root` through the fault hook.
class Recorder {
 public:
  explicit Recorder(std::string root) : root_(std::move(root)) {
    Look(&tree_, &contents_);
    first_tree_ = tree_;
    first_contents_ = contents_;
    SetFaultHook([this](const FaultSite& site) {
      std::lock_guard<std::mutex> lock(mutex_);
      Settle();
      if (std::string(site.op) == "fsync") syncing_ = Resolve(site.path);
      return FaultAction();
    });
  }
  void Stop() {
    SetFaultHook(nullptr);
    Settle();
  }

  const std::vector<Op>& ops() const { return ops_; }
  const Tree& first_tree() const { return first_tree_; }
  const std::map<Id, std::string>& first_contents() const {
    return first_contents_;
  }
  bool IsDirectory(Id id) const { return directories_.contains(id); }

 private:
  // A directory that was renamed goes on being called by its old path.
  Id Resolve(const std::string& path) {
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

  void Settle() {
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

  void Look(Tree* tree, std::map<Id, std::string>* contents) {
    std::map<uint64_t, Id> seen;
    by_path_[root_] = kRoot;
    directories_.insert(kRoot);
    Visit(root_, kRoot, tree, contents, &seen);
    ids_ = std::move(seen);  // an inode that is gone may come back as another
  }

  void Visit(const std::string& path, Id directory, Tree* tree,
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
        (*contents)[id] = ReadText(entry.path().string());
      }
    }
  }

  const std::string root_;
  std::mutex mutex_;
  std::vector<Op> ops_;
  Tree tree_, first_tree_;
  std::map<Id, std::string> contents_, first_contents_;
  std::map<std::string, Id> by_path_;  // last seen there
  std::map<uint64_t, Id> ids_;         // by inode
  std::set<Id> directories_;
  Id next_ = kRoot + 1, syncing_ = -1;
};

// The states that a crash after the first `prefix` operations may leave.
class CrashStates {
 public:
  CrashStates(const Recorder& recorder, size_t prefix)
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

  // Writes each state under a new `path` and calls `check`, unless an equal
  // one was in `done`.
  void ForEach(const std::string& path, std::set<std::string>* done,
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
        if (done->insert(std::move(key)).second) {
          Materialise(path, files);
          check(path);
          fs::remove_all(path);
        }
        if (!undecided) break;
      }
    }
  }

 private:
  bool Durable(size_t i) const {
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

  // Sets of operations that are lost.
  std::vector<std::set<size_t>> Choices(std::mt19937* random) const {
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

  Tree Names(const std::set<size_t>& lost) const {
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

  // Relative paths, with contents; those of directories end in '/'.
  void Collect(const Tree& tree, Id directory, const std::string& prefix,
               int variant, std::mt19937* random,
               std::map<std::string, std::string>* files,
               bool* undecided) const {
    for (auto it = tree.lower_bound({directory, ""});
         it != tree.end() && it->first.first == directory; ++it) {
      const std::string path = prefix + it->first.second;
      if (recorder_.IsDirectory(it->second)) {
        (*files)[path + "/"];
        Collect(tree, it->second, path + "/", variant, random, files,
                undecided);
      } else {
        (*files)[path] = Content(it->second, variant, random, undecided);
      }
    }
  }

  std::string Content(Id id, int variant, std::mt19937* random,
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

  static void Materialise(const std::string& path,
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

  const Recorder& recorder_;
  const size_t prefix_;
  std::vector<size_t> open_;  // operations that may be lost
  std::map<Id, std::string> synced_, latest_;
};

using Contents = std::map<std::string, std::string>;

class CrashTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    fs::create_directory(Path("live"));
  }

  std::string Live(const std::string& name) const {
    return Path("live/" + name);
  }

  std::vector<Piece> OldPieces() { return GridPieces("a", old_, {3, 1}); }
  std::vector<Piece> NewPieces() {
    std::vector<Piece> pieces = GridPieces("a", new_, {2, 1});
    pieces.push_back(WholePiece("b", extra_, 1));
    return pieces;
  }
  Contents NewContents() const {
    return {{"a", new_.bytes}, {"b", extra_.bytes}, {"step", kObject}};
  }
  SaveSettings Settings() const {
    SaveSettings settings;
    settings.object = kObject;
    settings.output.workers = 1;
    return settings;
  }

  // Runs `save` on `target` (below live/) and checks every state. `old`: what
  // the directory held; nothing when it held no checkpoint. `others`: names in
  // the target that no save may touch.
  void Check(const std::string& target, const std::optional<Contents>& old,
             const Contents& fresh, const std::function<Status()>& save,
             const std::vector<std::string>& others = {}) {
    Recorder recorder(Path("live"));
    const Status saved = save();
    recorder.Stop();
    ASSERT_OK(saved);
    std::set<std::string> done;
    bool saw_old = false, saw_new = false;
    for (size_t prefix = 0; prefix <= recorder.ops().size(); ++prefix) {
      const bool whole = prefix == recorder.ops().size();
      // What is acknowledged is durable: no state counts as seen for that.
      if (whole) done.clear();
      CrashStates states(recorder, prefix);
      states.ForEach(Path("state"), &done, [&](const std::string& path) {
        ++states_;
        const std::string at = path + "/" + target;
        auto read = ReadAll(at);
        const bool is_new = read.ok() && *read == fresh;
        const bool is_old =
            old ? read.ok() && *read == *old
                : read.status().kind() == ErrorKind::kIncomplete;
        saw_old = saw_old || is_old;
        saw_new = saw_new || is_new;
        if (!(is_new || (is_old && !whole))) {
          Fail(recorder, prefix, path, read.status());
          return;
        }
        if (states_ % 2 == 0) {
          const auto recovered = RecoverDirectory(at);
          const auto again = ReadAll(at);
          if (!recovered.ok() || again.ok() != read.ok() ||
              (read.ok() && *again != *read)) {
            Fail(recorder, prefix, path, recovered.status());
            return;
          }
        }
        const Status next =
            SaveAll(at, GridPieces("c", third_, {1, 2})).status();
        auto last = ReadAll(at);
        if (!next.ok() || !last.ok() ||
            *last != Contents{{"c", third_.bytes}}) {
          Fail(recorder, prefix, path, next.ok() ? last.status() : next);
          return;
        }
        std::vector<std::string> expected = {
            ShardFileName(0, 1, 1), ShardFileName(1, 1, 1),
            "torch_ckpt.catalog", "torch_ckpt.json"};
        for (const std::string& other : others) {
          if (fs::exists(at + "/" + other)) expected.push_back(other);
        }
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(Names(at), expected) << "prefix " << prefix;
        const std::string parent = fs::path(at).parent_path().string();
        for (const std::string& name : Names(parent)) {
          EXPECT_FALSE(name.ends_with(kStageSuffix)) << "prefix " << prefix;
        }
      });
      if (HasFailure()) return;
    }
    EXPECT_TRUE(saw_old);
    EXPECT_TRUE(saw_new);
    EXPECT_GT(states_, 10);
    RecordProperty("states", states_);
  }

  void Fail(const Recorder& recorder, size_t prefix, const std::string& path,
            const Status& status) {
    if (HasFailure()) return;  // the first one says enough
    std::string tree;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      tree += "  " + fs::relative(entry.path(), path).string();
      if (entry.is_regular_file()) {
        tree += " " + std::to_string(entry.file_size());
      }
      tree += "\n";
    }
    std::string last;
    for (size_t i = prefix < 4 ? 0 : prefix - 4; i < prefix; ++i) {
      const Op& op = recorder.ops()[i];
      last += "  " + std::to_string(op.kind) + " id " + std::to_string(op.id);
      for (const auto& entry : op.removed) last += " -" + entry.first.second;
      for (const auto& entry : op.added) last += " +" + entry.first.second;
      last += "\n";
    }
    ADD_FAILURE() << "after " << prefix << " of " << recorder.ops().size()
                  << " operations, the last ones\n"
                  << last << status.ToString() << "\nin\n"
                  << tree;
  }

  const std::string kObject = "{\"step\": 7}";
  const Array old_ = MakeArray(Dtype::kF32, {30, 4}, 1);
  const Array new_ = MakeArray(Dtype::kF32, {30, 4}, 2);
  const Array extra_ = MakeArray(Dtype::kI8, {9}, 3);
  const Array third_ = MakeArray(Dtype::kF32, {3, 4}, 4);
  int states_ = 0;
};

TEST_F(CrashTest, FreshTarget) {
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, EmptyTarget) {
  fs::create_directory(Live("t"));
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ParentsThatAreMissing) {
  Check("x/y/z/t", std::nullopt, NewContents(), [&] {
    return SaveAll(Live("x/y/z/t"), NewPieces(), Settings()).status();
  });
}

TEST_F(CrashTest, OneMissingParent) {
  Check("x/t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("x/t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ExistingCheckpoint) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  WriteText(Live("t/config.json"), "{}");
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); },
        {"config.json"});
}

TEST_F(CrashTest, OtherFilesButNoCheckpoint) {
  fs::create_directory(Live("t"));
  WriteText(Live("t/config.json"), "{}");
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); },
        {"config.json"});
}

// Whoever made the target for us need not have synced it.
TEST_F(CrashTest, TargetMadeJustBefore) {
  Check("t", std::nullopt, NewContents(),
        [&] {
          fs::create_directory(Live("t"));
          WriteText(Live("t/config.json"), "{}");
          return SaveAll(Live("t"), NewPieces(), Settings()).status();
        },
        {"config.json"});
}

// Names of stock shards are ours too: they are replaced one by one.
TEST_F(CrashTest, ForeignCheckpoint) {
  fs::create_directory(Live("t"));
  for (const Piece& piece : GridPieces("a", old_, {2, 1})) {
    WriteForeign(Live("t/" + ShardFileName(piece.rank, 1, 1)),
                 {ForeignBox("a", old_, piece.box)});
  }
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ConsolidationIntoAnExistingDirectory) {
  ASSERT_OK(SaveAll(Path("in"), NewPieces(), Settings()).status());
  ASSERT_OK(SaveAll(Path("in2"), OldPieces()).status());
  MergeSettings settings;
  settings.output.workers = 1;
  ASSERT_OK(Merge(Path("in2"), Live("t"), settings).status());
  settings.ranks = 2;
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return Merge(Path("in"), Live("t"), settings).status(); });
}

TEST_F(CrashTest, ConsolidationInPlace) {
  ASSERT_OK(SaveAll(Live("t"), NewPieces(), Settings()).status());
  MergeSettings settings;
  settings.output.workers = 1;
  settings.in_place = true;
  Check("t", NewContents(), NewContents(),
        [&] { return Merge(Live("t"), Live("t"), settings).status(); });
}

// Somebody fills the target while a first save into it goes on.
TEST_F(CrashTest, TargetFilledMeanwhile) {
  Check("t", std::nullopt, NewContents(),
        [&]() -> Status {
          TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(Live("t"), true));
          CommitRequest request;
          TC_RETURN_IF_ERROR(WriteRanks(session.place().path, NewPieces(),
                                        Settings(), &request));
          fs::create_directory(Live("t"));
          WriteText(Live("t/config.json"), "{}");
          return CommitSave(&session, request).status();
        },
        {"config.json"});
}

// A commit whose replay failed half way is carried on by the next save, which
// may itself be cut off.
TEST_F(CrashTest, ReplayOfAnEarlierCommit) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  int renames = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool into = std::string(site.op) == "renameat" &&
                      site.path2.starts_with(Live("t/shard"));
    return {.sys_errno = into && ++renames == 2 ? EIO : 0};
  });
  EXPECT_EQ(SaveAll(Live("t"), OldPieces(), Settings()).status().sys_errno(),
            EIO);
  SetFaultHook(nullptr);
  EXPECT_EQ(renames, 2);
  Check("t", Contents{{"a", old_.bytes}, {"step", kObject}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

// What a first save that died has left beside a target that is filled since.
TEST_F(CrashTest, StagingBesideTheTarget) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  fs::create_directory(Live(".t" + std::string(kStageSuffix)));
  WriteText(Live(".t" + std::string(kStageSuffix) + "/x"), "x");
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

// Without collectives: two ranks commit one after the other.
TEST_F(CrashTest, PartsOfTwoRanks) {
  Check("t", std::nullopt, NewContents(), [&]() -> Status {
    for (const int64_t rank : {0, 1}) {
      TC_ASSIGN_OR_RETURN(
          PartSession session,
          BeginPart(Live("t"), {rank, 2, std::string(32, 'a'), 0}));
      std::vector<Piece> pieces = NewPieces();
      std::erase_if(pieces, [&](const Piece& p) { return p.rank != rank; });
      SaveSettings settings = Settings();
      if (rank > 0) settings.object.clear();
      CommitRequest request;
      TC_RETURN_IF_ERROR(
          WriteRanks(session.path(), pieces, settings, &request));
      TC_RETURN_IF_ERROR(CommitPart(&session, request).status());
    }
    return {};
  });
}

}  // namespace
}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
