// Ranks of one node meet, to hand their boxes in the bands of their ring to the
// one among them that writes these (engine/save/ring_write.h).
//
// The leader listens; each other member connects to it, says which boxes it
// has, and gives it a memory file with slots that its bytes will go through.
// When all are there and the boxes tile the bands, the leader says yes to
// all; else no, and every member puts its boxes into its spill instead.
// A member that cannot take part leaves a file in staging that says so, for
// those who wait for it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/box.h"
#include "engine/open/header_io.h"
#include "engine/save/final_files.h"
#include "os/local_socket.h"
#include "runtime/jobs.h"
#include "runtime/slots.h"

namespace torch_ckpt {

// A box in one of the ring's tensors.
struct RingBox {
  size_t tensor = 0;  // its position in RingTensorsOf
  Box box;            // in elements
};

// The other end as one member sees it.
struct RingPeer {
  int64_t rank = 0;
  std::vector<RingBox> boxes;  // of a sender, for the leader
  LocalSocket socket;          // open for as long as the peer takes part
  std::shared_ptr<std::byte> memory;
  SlotQueue slots;

  // For who begins to wait at the slots now: ok while there may be more to
  // come, kCancelled, naming the peer, when it is gone or has done nothing for
  // ten minutes. (What is wrong it says itself.)
  StillWanted Patience(const Job& job) const;
  Status Gone(const char* what) const;
};

// Where the leader listens (os/local_socket.h): a name for each save, and for
// all who cut pieces and talk in the same way.
std::string RingName(const FinalFiles& list, const FinalRing& ring);

// Both wait for the other members, a minute at most. An empty list: there is to
// be no ring. REQUIRES: this rank is a member.
//
// Of the leader, which has `own` boxes: all senders.
Result<std::vector<RingPeer>> LeadRing(const Directory& staging,
                                       const FinalFiles& list,
                                       const std::vector<RingTensor>& tensors,
                                       const FinalRing& ring,
                                       const std::vector<RingBox>& own,
                                       Job* job);
// Of a sender with these boxes: the leader.
Result<std::vector<RingPeer>> JoinRing(const Directory& staging,
                                       const FinalFiles& list,
                                       const FinalRing& ring, int64_t rank,
                                       const std::vector<RingBox>& own,
                                       Job* job);

// Tells those who wait for this rank, here or later, that it does not come.
void RefuseRing(const Directory& staging, int64_t rank);

}  // namespace torch_ckpt
