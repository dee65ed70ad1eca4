// Gathered tensors through a ring: every rank is a thread.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "final_test_util.h"
#include "format/binary.h"
#include "os/fault.h"
#include "os/local_socket.h"
#include "os/shared_memory.h"

namespace torch_ckpt {
namespace {

class RingTest : public EngineDiskTest {
 protected:
  void Begin(const std::vector<Piece>& pieces, std::vector<FinalRing> rings,
             const std::vector<std::string>& gathered,
             const FileRule& rule = {}) {
    std::vector<FinalTensor> tensors = FinalTensorsOf(pieces, gathered);
    for (FinalTensor& tensor : tensors) {
      for (FinalBand& band : tensor.bands) band.ring = rings.empty() ? -1 : 0;
    }
    BeginWith(tensors, std::move(rings), rule);
  }
  void BeginWith(const std::vector<FinalTensor>& tensors,
                 std::vector<FinalRing> rings, const FileRule& rule = {}) {
    session_.reset();
    auto begun = BeginSave(Path("c"), true);
    ASSERT_OK(begun.status());
    session_ = std::make_unique<SaveSession>(std::move(begun).value());
    auto list = StageFinalFiles(session_->directory(), tensors, rule, {}, true,
                                std::move(rings));
    ASSERT_OK(list.status());
    list_ = std::move(list).value();
  }
  std::string staging() const { return session_->place().path; }

  // What every one of `ranks` writes of `pieces`, at the same time.
  std::vector<Result<RankFinals>> WriteRanks(const std::vector<int64_t>& ranks,
                                             const std::vector<Piece>& pieces,
                                             int workers = 2) {
    OutputOptions options;
    options.workers = workers;
    std::vector<Result<RankFinals>> out(ranks.size(), Internal("never ran"));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        out[i] =
            WriteFinalRank(staging(), ranks[i], pieces, options, &ring_bytes_);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return out;
  }

  // Commits, and compares every tensor with its array.
  void Finish(std::vector<Result<RankFinals>> written,
              const std::vector<Piece>& pieces) {
    std::vector<RankFinals> ranks;
    for (Result<RankFinals>& rank : written) {
      ASSERT_OK(rank.status());
      ranks.push_back(std::move(rank).value());
    }
    Job job;
    CommitRequest request;
    auto files = RunAssembleJob(session_->directory(), list_, ranks, {}, &job);
    ASSERT_OK(files.status());
    request.files = std::move(files).value();
    request.world_size = static_cast<int64_t>(ranks.size());
    request.index_name = list_.index_name;
    ASSERT_OK(CommitSave(session_.get(), request).status());
    auto all = ReadAll(Path("c"));
    ASSERT_OK(all.status());
    for (const Piece& piece : pieces) {
      EXPECT_TRUE(all->at(piece.name) == piece.array->bytes) << piece.name;
    }
  }

  std::unique_ptr<SaveSession> session_;
  FinalFiles list_;
  std::atomic<uint64_t> ring_bytes_{0};
};

std::vector<Piece> Joined(std::vector<std::vector<Piece>> lists) {
  std::vector<Piece> all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

TEST_F(RingTest, ColumnsOfManySizes) {
  std::mt19937 random(1);
  for (int round = 0; round < 12; ++round) {
    const auto below = [&](uint32_t n) {
      return static_cast<int64_t>(random() % n);
    };
    const int64_t ranks = 2 + below(3);
    std::vector<Array> arrays;
    for (int i = 0; i < 5; ++i) {
      const Dtype dtype = round % 2 == 0 ? Dtype::kBF16 : Dtype::kF64;
      // Some of several pieces, some smaller than a block.
      arrays.push_back(
          MakeArray(dtype, {1 + below(i == 0 ? 20000 : 60), ranks + below(90)},
                    static_cast<uint32_t>(random())));
    }
    const Array cube = MakeArray(Dtype::kF32, {7, 6 * ranks, 11}, 5);
    const Array rows = MakeArray(Dtype::kU8, {ranks, 70000}, 6);
    std::vector<Piece> pieces = GridPieces("cube", cube, {1, ranks, 1});
    std::vector<std::string> gathered{"cube"};
    for (size_t i = 0; i < arrays.size(); ++i) {
      const std::string name = "columns" + std::to_string(i);
      pieces = Joined({pieces, GridPieces(name, arrays[i], {1, ranks})});
      gathered.push_back(name);
    }
    pieces = Joined({pieces, GridPieces("rows", rows, {ranks, 1})});
    FinalRing ring{0, {}};
    std::vector<int64_t> all{0};
    for (int64_t rank = 1; rank < ranks; ++rank) {
      ring.senders.push_back(rank);
      all.push_back(rank);
    }
    ring_bytes_ = 0;
    Begin(pieces, {ring}, gathered);
    auto written = WriteRanks(all, pieces);
    // Only edges are left for the coordinator.
    for (const auto& rank : written) {
      ASSERT_OK(rank.status());
      for (const WrittenSpill& spill : rank->spills) {
        EXPECT_TRUE(spill.boxes.empty());
      }
    }
    EXPECT_GT(ring_bytes_, cube.bytes.size());
    Finish(std::move(written), pieces);
  }
}

#ifdef TORCH_CKPT_FAULTS
// While the leader is busy with what members send, they write what is theirs.
TEST_F(RingTest, AMembersOwnRowsDoNotWaitForTheLeader) {
  // More pieces than there are slots, so that the member cannot have sent all.
  const Array columns = MakeArray(Dtype::kU8, {16, int64_t{kPieceBytes}}, 1);
  const Array rows = MakeArray(Dtype::kU8, {4, 4096}, 2);
  std::vector<Piece> pieces = GridPieces("columns", columns, {1, 2});
  pieces.push_back({1, "rows", &rows, Box::Whole(rows.shape)});
  FileRule rule;
  rule.mapping.emplace();
  rule.mapping->emplace_back("columns", 1);
  rule.mapping->emplace_back("rows", 2);
  Begin(pieces, {FinalRing{0, {1}}}, {"columns"}, rule);
  ASSERT_EQ(list_.files.size(), 2u);
  std::mutex mutex;
  std::condition_variable written;
  bool has_rows = false, came_late = false;
  SetFaultHook([&](const FaultSite& site) {
    if (!std::string_view(site.op).starts_with("pwrite")) {
      return FaultAction{};
    }
    std::unique_lock<std::mutex> lock(mutex);
    if (site.path.find(list_.files[1].staged) != std::string::npos) {
      has_rows = true;
      written.notify_all();
    } else if (site.path.find(list_.files[0].staged) != std::string::npos &&
               !came_late) {
      came_late = !written.wait_for(lock, std::chrono::seconds(120),
                                    [&] { return has_rows; });
    }
    return FaultAction{};
  });
  auto ranks = WriteRanks({0, 1}, pieces, 1);
  SetFaultHook(nullptr);
  EXPECT_TRUE(has_rows);
  EXPECT_FALSE(came_late);
  Finish(std::move(ranks), pieces);
}
#endif

// Rows over two nodes, columns over the two ranks of each.
class TwoNodes : public RingTest {
 protected:
  void SetUp() override {
    RingTest::SetUp();
    array_ = MakeArray(Dtype::kBF16, {50001, 30}, 11);
    odd_ = MakeArray(Dtype::kU8, {30001, 5}, 12);
    small_ = MakeArray(Dtype::kF32, {5, 2}, 13);  // no whole block of a band
    // Ranks by rows, then columns: 0 and 1 have the first rows.
    pieces_ = Joined({GridPieces("w", array_, {2, 2}),
                      GridPieces("odd", odd_, {2, 2}),
                      GridPieces("small", small_, {2, 2})});
  }
  // Each node's rows as bands of these rings.
  std::vector<FinalTensor> Banded(int64_t first, int64_t second) const {
    std::vector<FinalTensor> tensors = FinalTensorsOf(pieces_);
    for (FinalTensor& tensor : tensors) {
      int64_t rows = 0;  // of the first node
      for (const Piece& piece : pieces_) {
        if (piece.name == tensor.name && piece.rank == 0) {
          rows = piece.box.sizes[0];
        }
      }
      tensor.bands = {{first, 0, rows}, {second, rows, tensor.shape[0]}};
    }
    return tensors;
  }
  uint64_t AllBytes() const {
    return array_.bytes.size() + odd_.bytes.size() + small_.bytes.size();
  }
  Array array_, odd_, small_;
  std::vector<Piece> pieces_;
};

TEST_F(TwoNodes, EachWritesItsRows) {
  BeginWith(Banded(0, 1), {{0, {1}}, {3, {2}}});
  auto written = WriteRanks({0, 1, 2, 3}, pieces_);
  EXPECT_EQ(ring_bytes_, AllBytes());
  for (const auto& rank : written) {
    ASSERT_OK(rank.status());
    for (const WrittenSpill& spill : rank->spills) {
      EXPECT_TRUE(spill.boxes.empty());
    }
  }
  Finish(std::move(written), pieces_);
}

TEST_F(TwoNodes, OneCannot) {
  BeginWith(Banded(0, 1), {{0, {1}}, {3, {2}}});
  RefuseRing(session_->directory(), 2);
  auto written = WriteRanks({0, 1, 2, 3}, pieces_);
  EXPECT_GT(ring_bytes_, 0u);
  EXPECT_LT(ring_bytes_, AllBytes());
  Finish(std::move(written), pieces_);
}

TEST_F(TwoNodes, NeitherCanAndBandsAreGathered) {
  for (const bool rings : {true, false}) {
    ring_bytes_ = 0;
    if (rings) {
      BeginWith(Banded(0, 1), {{0, {1}}, {3, {2}}});
      for (const int64_t rank : {1, 2}) {
        RefuseRing(session_->directory(), rank);
      }
    } else {
      BeginWith(Banded(-1, -1), {});
    }
    auto written = WriteRanks({0, 1, 2, 3}, pieces_);
    EXPECT_EQ(ring_bytes_, 0u);
    Finish(std::move(written), pieces_);
  }
}

// What is in no band its owners write.
TEST_F(TwoNodes, BandsOfOneNodeOnly) {
  std::vector<FinalTensor> tensors = Banded(0, -1);
  for (FinalTensor& tensor : tensors) tensor.bands.pop_back();
  BeginWith(tensors, {{0, {1}}});
  Finish(WriteRanks({0, 1, 2, 3}, pieces_), pieces_);
}

TEST_F(TwoNodes, ABoxThatIsHalfInABandIsOfAnotherPlan) {
  BeginWith(Banded(0, 1), {{0, {1}}, {3, {2}}});
  std::vector<Piece> other = pieces_;
  for (Piece& piece : other) {
    if (piece.rank == 0 && piece.name == "w") ++piece.box.sizes[0];
  }
  const Status status = WriteFinalRank(staging(), 0, other).status();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
  EXPECT_EQ(status.tensor(), "w");
}

TEST_F(TwoNodes, BandsAreRowsInOrderOfRingsThatThereAre) {
  const std::vector<std::vector<FinalBand>> wrong = {
      {{1, 0, 5}},              // no such ring
      {{-2, 0, 5}},             // nor this
      {{0, 0, 50002}},          // more rows than there are
      {{0, 5, 5}},              // none
      {{0, -1, 5}},             //
      {{0, 0, 5}, {-1, 4, 9}},  // twice
      {{-1, 5, 9}, {0, 0, 5}},  // not in order
      {{0, 0, 5}, {0, 7, 9}},   // two of one ring
  };
  for (const std::vector<FinalBand>& bands : wrong) {
    session_.reset();
    auto begun = BeginSave(Path("c"), true);
    ASSERT_OK(begun.status());
    std::vector<FinalTensor> tensors = FinalTensorsOf(pieces_);
    tensors[0].bands = bands;
    const Status status =
        StageFinalFiles(begun->directory(), tensors, {}, {}, true, {{0, {1}}})
            .status();
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument) << status.ToString();
    EXPECT_EQ(status.tensor(), "w");
  }
}

class TwoRanks : public RingTest {
 protected:
  void SetUp() override {
    RingTest::SetUp();
    array_ = MakeArray(Dtype::kF32, {200000, 64}, 9);  // more than all slots
    pieces_ = GridPieces("w", array_, {1, 2});
  }
  Array array_;
  std::vector<Piece> pieces_;
};

TEST_F(TwoRanks, AnyLeader) {
  Begin(pieces_, {{1, {0}}}, {"w"});
  Finish(WriteRanks({0, 1}, pieces_), pieces_);
  EXPECT_EQ(ring_bytes_, array_.bytes.size());
}

TEST_F(TwoRanks, ARankThatRefusesMakesNoRing) {
  for (const int64_t refusing : {0, 1}) {
    ring_bytes_ = 0;
    Begin(pieces_, {{0, {1}}}, {"w"});
    RefuseRing(session_->directory(), refusing);
    // The one that has refused comes later, or never: nobody waits for it.
    Result<RankFinals> other =
        WriteFinalRank(staging(), 1 - refusing, pieces_, {}, &ring_bytes_);
    ASSERT_OK(other.status());
    auto own = WriteFinalRank(staging(), refusing, pieces_, {}, &ring_bytes_);
    std::vector<Result<RankFinals>> written;
    written.push_back(std::move(other));
    written.push_back(std::move(own));
    EXPECT_EQ(ring_bytes_, 0u);
    Finish(std::move(written), pieces_);
  }
}

TEST_F(TwoRanks, ASystemWithoutSharedMemoryMakesNoRing) {
  for (const char* call : {"memfd_create", "socket", "sendmsg", "bind"}) {
    ring_bytes_ = 0;
    Begin(pieces_, {{0, {1}}}, {"w"});
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == std::string(call) ? ENOSYS : 0};
    });
    auto written = WriteRanks({0, 1}, pieces_);
    SetFaultHook(nullptr);
    EXPECT_EQ(ring_bytes_, 0u) << call;
    Finish(std::move(written), pieces_);
  }
}

// Who comes may be anybody of this user: the save goes on without a ring.
TEST_F(TwoRanks, WhoSaysSomethingElseMakesNoRing) {
  const auto memory = SharedMemory::Create(size_t{2} << 20);
  ASSERT_OK(memory.status());
  const auto data = (*memory)->Map(size_t{64} << 20);
  ASSERT_OK(data.status());
  std::string of_no_tensor;  // rank, place, count; tensor, dimensions, a box
  for (const uint64_t number :
       {uint64_t{1}, (*memory)->OffsetOf(*data), uint64_t{1}, uint64_t{77},
        uint64_t{1}, uint64_t{0}, uint64_t{1}}) {
    PutVarint(&of_no_tensor, number);
  }
  std::string truncated, of_no_memory, long_winded;
  PutVarint(&truncated, 1);             // the rank, and then nothing
  for (const int number : {1, 0, 0}) {  // rank, place, count of boxes
    PutVarint(&of_no_memory, static_cast<uint64_t>(number));
  }
  long_winded = of_no_memory + "and more";
  std::string of_a_box = truncated + std::string("\0\1\377\377\377\17", 6);
  for (const std::string& said :
       {std::string(), std::string(40, '\xff'), truncated, of_a_box,
        long_winded, of_no_memory, of_no_tensor}) {
    ring_bytes_ = 0;
    Begin(pieces_, {{0, {1}}}, {"w"});
    std::vector<Result<RankFinals>> written(2, Internal("never ran"));
    std::thread leading([&] {
      written[0] = WriteFinalRank(staging(), 0, pieces_, {}, &ring_bytes_);
    });
    std::optional<LocalSocket> socket;
    while (!socket) {
      auto connected = LocalSocket::Connect(RingName(list_, {0, {1}}));
      ASSERT_OK(connected.status());
      socket = std::move(*connected);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto file = session_->directory().OpenFile("final_files", {});
    ASSERT_OK(file.status());
    const int sent = said == of_no_tensor ? (*memory)->fd() : file->fd();
    ASSERT_OK(socket->Send(said, [] { return Status(); }, sent));
    leading.join();
    EXPECT_TRUE(socket->PeerIsGone());
    written[1] = WriteFinalRank(staging(), 1, pieces_, {}, &ring_bytes_);
    EXPECT_EQ(ring_bytes_, 0u);
    Finish(std::move(written), pieces_);
  }
}

TEST_F(TwoRanks, BoxesThatDoNotTileAreFoundAsEver) {
  Begin(pieces_, {{0, {1}}}, {"w"});
  std::vector<Piece> short_one = pieces_;
  for (Piece& piece : short_one) {
    if (piece.rank == 1) --piece.box.sizes[0];
  }
  auto written = WriteRanks({0, 1}, short_one);
  EXPECT_EQ(ring_bytes_, 0u);
  std::vector<RankFinals> ranks;
  for (auto& rank : written) {
    ASSERT_OK(rank.status());
    ranks.push_back(std::move(rank).value());
  }
  Job job;
  const Status status =
      RunAssembleJob(session_->directory(), list_, ranks, {}, &job).status();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete) << status.ToString();
  EXPECT_EQ(status.tensor(), "w");
}

// The others end when one fails in the middle, and so do its own workers that
// wait for a piece of the other one.
TEST_F(TwoRanks, AFailureInTheMiddleEndsTheOther) {
  for (const int workers : {1, 2, 20}) {
    session_.reset();
    Begin(pieces_, {{0, {1}}}, {"w"});
    std::atomic<int> writes{0};
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool data = site.op == std::string("pwrite") &&
                        site.path.find("model-") != std::string::npos;
      return {.sys_errno = data && ++writes == 3 ? ENOSPC : 0};
    });
    const auto written = WriteRanks({0, 1}, pieces_, workers);
    SetFaultHook(nullptr);
    EXPECT_EQ(written[0].status().sys_errno(), ENOSPC)
        << written[0].status().ToString();
    // All that it has is in slots or with the leader's workers, of which there
    // are twice as many, before the third write; not so with two.
    if (workers > 1 && written[1].ok()) continue;
    EXPECT_EQ(written[1].status().kind(), ErrorKind::kCancelled)
        << written[1].status().ToString();
    EXPECT_NE(written[1].status().message().find("rank 0"), std::string::npos);
  }
}

TEST_F(TwoRanks, ManyMoreWorkersThanSlots) {
  Begin(pieces_, {{0, {1}}}, {"w"});
  Finish(WriteRanks({0, 1}, pieces_, 40), pieces_);
}

TEST_F(TwoRanks, TheCoordinatorsEndEndsWhoWaits) {
  Begin(pieces_, {{0, {1}}}, {"w"});
  Result<RankFinals> written = Internal("never ran");
  std::thread waiting(
      [&] { written = WriteFinalRank(staging(), 1, pieces_, {}, nullptr); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  session_.reset();  // wipes the staging directory
  waiting.join();
  EXPECT_FALSE(written.ok());
}

}  // namespace
}  // namespace torch_ckpt
