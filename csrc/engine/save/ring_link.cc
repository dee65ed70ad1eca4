#include "engine/save/ring_link.h"

#include <chrono>
#include <set>
#include <thread>

#include "base/checked.h"
#include "engine/write/output_files.h"
#include "format/binary.h"
#include "os/memory.h"
#include "os/shared_memory.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kMeetingTime{1};
constexpr std::chrono::minutes kStalled{10};
constexpr size_t kAlignment = size_t{2} << 20;
constexpr const char* kYes = "yes";

uint64_t SlotMemory() {
  return RoundUp(SlotQueue::Bytes(kPieceBytes), kAlignment);
}

std::string RefusalOf(int64_t rank) {
  return "ring_refused." + std::to_string(rank);
}

bool HasRefused(const Directory& staging, int64_t rank) {
  const auto info = staging.StatName(RefusalOf(rank));
  return info.ok() && info->has_value();
}

// While the members wait for each other: kCancelled, or kUnsupported for what
// means that there will be no ring.
class Waiting {
 public:
  Waiting(const Directory& staging, std::set<int64_t> ranks, const Job& job,
          Clock::duration patience)
      : staging_(staging),
        ranks_(std::move(ranks)),
        job_(job),
        until_(Clock::now() + patience) {}

  Status operator()() const {
    if (job_.ending()) return Cancelled("the job was cancelled");
    for (const int64_t rank : ranks_) {
      if (HasRefused(staging_, rank)) return Unsupported("a rank has refused");
    }
    if (!HasFinalFiles(staging_)) return Unsupported("the save has ended");
    if (Clock::now() > until_) return Unsupported("a rank has not come");
    return {};
  }

 private:
  const Directory& staging_;
  std::set<int64_t> ranks_;
  const Job& job_;
  const Clock::time_point until_;
};

std::string HelloOf(int64_t rank, const std::vector<RingBox>& boxes,
                    uint64_t offset) {
  std::string hello;
  PutVarint(&hello, static_cast<uint64_t>(rank));
  PutVarint(&hello, offset);
  PutVarint(&hello, boxes.size());
  for (const RingBox& box : boxes) {
    PutVarint(&hello, box.tensor);
    PutVarint(&hello, static_cast<uint64_t>(box.box.rank()));
    PutDims(&hello, box.box.offsets);
    PutDims(&hello, box.box.sizes);
  }
  return hello;
}

// The peer that says this. kUnsupported for anything else than a hello.
Result<RingPeer> PeerOf(LocalSocket socket, LocalMessage message) {
  const Status malformed = Unsupported("a member of the ring is no such one");
  BinaryReader in(AsBytes(message.text));
  const auto rank = in.Bounded(INT64_MAX);
  const auto offset = in.Varint();
  const auto count = in.Bounded(in.left());
  if (!rank || !offset || !count || !message.descriptor.valid()) {
    return malformed;
  }
  std::vector<RingBox> boxes;  // of two bytes each, and more in memory
  for (uint64_t b = 0; b < *count; ++b) {
    const auto tensor = in.Bounded(SIZE_MAX);
    const auto dims = in.Bounded(kMaxDims);
    if (!tensor || !dims) return malformed;
    const auto offsets = in.Sizes(static_cast<int>(*dims));
    const auto sizes = in.Sizes(static_cast<int>(*dims));
    if (!offsets || !sizes) return malformed;
    boxes.push_back({*tensor, {*offsets, *sizes}});
  }
  if (!in.empty()) return malformed;
  const size_t bytes = SlotMemory();
  TC_ASSIGN_OR_RETURN(const SharedRange range,
                      FindShared(message.descriptor.fd(), *offset, bytes));
  TC_ASSIGN_OR_RETURN(std::byte* const data,
                      MapShared(message.descriptor.fd(), range));
  std::shared_ptr<std::byte> memory(
      data, [bytes](std::byte* mapped) { UnmapMemory(mapped, bytes); });
  return RingPeer{static_cast<int64_t>(*rank), std::move(boxes),
                  std::move(socket), memory, SlotQueue(data, kPieceBytes)};
}

// Ok where the boxes of all members tile the ring's tensors.
Status CheckTiling(const std::vector<RingTensor>& tensors,
                   const std::vector<RingBox>& own,
                   const std::vector<RingPeer>& peers) {
  std::vector<std::vector<Box>> boxes(tensors.size());
  const auto add = [&](const std::vector<RingBox>& of_member) -> Status {
    for (const auto& [tensor, box] : of_member) {
      if (tensor >= boxes.size()) return Conflict("a box is of no tensor");
      boxes[tensor].push_back(box);
    }
    return {};
  };
  TC_RETURN_IF_ERROR(add(own));
  for (const RingPeer& peer : peers) TC_RETURN_IF_ERROR(add(peer.boxes));
  for (size_t t = 0; t < tensors.size(); ++t) {
    TC_RETURN_IF_ERROR(
        ProveTiling(Box::Whole(tensors[t].entry.shape), boxes[t]));
  }
  return {};
}

Result<std::vector<RingPeer>> Lead(const Directory& staging,
                                   const FinalFiles& list,
                                   const std::vector<RingTensor>& tensors,
                                   const FinalRing& ring,
                                   const std::vector<RingBox>& own, Job* job) {
  TC_ASSIGN_OR_RETURN(const LocalListener listener,
                      LocalListener::Listen(RingName(list, ring)));
  std::set<int64_t> awaited(ring.senders.begin(), ring.senders.end());
  // Of all, those who have come too: a sender may change its mind.
  const Waiting waiting(staging, awaited, *job, kMeetingTime);
  std::vector<RingPeer> peers;
  while (!awaited.empty()) {
    TC_ASSIGN_OR_RETURN(LocalSocket socket, listener.Accept(waiting));
    TC_ASSIGN_OR_RETURN(LocalMessage hello, socket.Receive(waiting));
    TC_ASSIGN_OR_RETURN(RingPeer peer,
                        PeerOf(std::move(socket), std::move(hello)));
    if (awaited.erase(peer.rank) == 0) {
      return Unsupported("a rank has come twice");
    }
    peers.push_back(std::move(peer));
  }
  TC_RETURN_IF_ERROR(CheckTiling(tensors, own, peers));
  TC_RETURN_IF_ERROR(waiting());
  for (const RingPeer& peer : peers) {
    if (peer.socket.PeerIsGone()) return Unsupported("a rank has left again");
  }
  return peers;
}

// What Lead and Join fail with before all have agreed is no error of the save.
bool MeansNoRing(const Status& status) {
  return status.kind() != ErrorKind::kCancelled;
}

}  // namespace

void RefuseRing(const Directory& staging, int64_t rank) {
  // Best effort: without it the others wait until their patience ends.
  (void)staging.WriteFile(RefusalOf(rank), "");
}

std::string RingName(const FinalFiles& list, const FinalRing& ring) {
  constexpr int kProtocol = 3;
  return "torch_ckpt-ring" + std::to_string(kProtocol) + "-" +
         std::to_string(kPieceBytes) + "-" + std::to_string(SlotQueue::kSlots) +
         "-" + list.files[0].id + "-" + std::to_string(ring.leader);
}

StillWanted RingPeer::Patience(const Job& job) const {
  return [this, &job, until = Clock::now() + kStalled]() -> Status {
    if (job.ending()) return Cancelled("the job has ended");
    if (socket.PeerIsGone()) return Gone("is gone or has failed");
    if (Clock::now() > until) return Gone("does not go on");
    return {};
  };
}

Status RingPeer::Gone(const char* what) const {
  return Cancelled("rank " + std::to_string(rank) +
                   ", with which this rank writes tensors, " + what);
}

Result<std::vector<RingPeer>> LeadRing(const Directory& staging,
                                       const FinalFiles& list,
                                       const std::vector<RingTensor>& tensors,
                                       const FinalRing& ring,
                                       const std::vector<RingBox>& own,
                                       Job* job) {
  Result<std::vector<RingPeer>> peers =
      Lead(staging, list, tensors, ring, own, job);
  if (!peers.ok()) {
    RefuseRing(staging, ring.leader);  // who waits for an answer is hung up on
    if (MeansNoRing(peers.status())) return std::vector<RingPeer>();
    return peers;
  }
  for (const RingPeer& peer : *peers) {
    if (!peer.socket.Send(kYes, peer.Patience(*job)).ok()) {
      return peer.Gone("is gone");
    }
  }
  return peers;
}

Result<std::vector<RingPeer>> JoinRing(const Directory& staging,
                                       const FinalFiles& list,
                                       const FinalRing& ring, int64_t rank,
                                       const std::vector<RingBox>& own,
                                       Job* job) {
  const Waiting waiting(staging, {ring.leader}, *job, kMeetingTime);
  // The leader's patience ends before.
  const Waiting for_answer(staging, {ring.leader}, *job, kStalled);
  const auto join = [&]() -> Result<std::vector<RingPeer>> {
    TC_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> shared,
                        SharedMemory::Create(kAlignment));
    TC_ASSIGN_OR_RETURN(std::byte* const data, shared->Map(SlotMemory()));
    std::optional<LocalSocket> socket;
    int tries = 0;
    while (!socket) {
      TC_ASSIGN_OR_RETURN(socket, LocalSocket::Connect(RingName(list, ring)));
      if (socket) break;
      // Looks into the staging directory, which may be far away, now and then.
      if (tries++ % 25 == 0) TC_RETURN_IF_ERROR(waiting());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    TC_RETURN_IF_ERROR(socket->Send(HelloOf(rank, own, shared->OffsetOf(data)),
                                    for_answer, shared->fd()));
    TC_ASSIGN_OR_RETURN(const LocalMessage answer, socket->Receive(for_answer));
    if (answer.text != kYes) return Unsupported("the leader has refused");
    std::vector<RingPeer> leader;
    leader.push_back({ring.leader,
                      {},
                      std::move(*socket),
                      std::shared_ptr<std::byte>(shared, data),
                      SlotQueue(data, kPieceBytes)});
    return leader;
  };
  Result<std::vector<RingPeer>> leader = join();
  if (leader.ok()) return leader;
  RefuseRing(staging, rank);
  if (MeansNoRing(leader.status())) return std::vector<RingPeer>();
  return leader;
}

}  // namespace torch_ckpt
