// Bands of tensors that the ranks of one node have: the members of a ring send
// what they have of them, through shared memory, to their leader, which writes
// whole pieces. No system call a row, and no block that two ranks write.
//
// The pieces are those of WriteOutputs over the bytes of these tensors, and all
// members know them from the staged headers. Of each piece a sender has one
// message: what its boxes have in it, one box after the other. Messages go
// through the slots of engine/ring_link.h in the order of the pieces.
//
// The first and last bytes of a stretch of tensors, which share a block with
// what others write, go to the files of parts of those who have them.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/output_files.h"
#include "engine/ring_link.h"
#include "engine/source_bytes.h"
#include "plan/byte_box.h"

namespace torch_ckpt {

// A box of this rank that it does not write by itself, and its bytes.
struct RingSource {
  FinalPlace tensor;
  std::string_view name;
  Box box;  // in elements
  FinalBand band;
  const SourceTensor* source = nullptr;
  uint64_t bytes = 0;  // after the cast
  std::optional<ElementCast> cast;
};

// Bytes of this rank that go to its file of parts: `range` of the file are
// those from `from` on of source `source`.
struct RingEdge {
  uint32_t file = 0;
  ByteRange range;
  size_t source = 0;
  uint64_t from = 0;
};

// One rank's part of it. The sources must stay where they are.
class RingWork {
 public:
  // Makes bytes of own() from `at` on. From several threads at once.
  using Make =
      std::function<Status(uint64_t at, MutableByteSpan out, int worker)>;

  bool leads() const { return leads_; }
  // This rank's boxes, one after the other.
  const SourceBytes& own() const { return own_; }

  // Sender: sends all messages. Errors are those of `make`, and kCancelled,
  // also where the leader is gone.
  Status Send(int workers, Job* job, const Make& make) const;

  // Leader: what WriteOutputs writes, in the order of the list of final files.
  const std::vector<OutputSpec>& files() const { return files_; }
  // Waits until all members have sent what they have of the piece at `begin`.
  Status Await(size_t file, uint64_t begin, const Job& job) const;
  // Then fills all of it, as a FillFn. `scratch` has kPieceBytes.
  Status Fill(size_t file, MutableByteSpan out, MutableByteSpan scratch,
              int worker, SegmentDigester* digester, const Make& make) const;

 private:
  friend Result<std::optional<RingWork>> PlanRingWork(
      const Directory& staging, const FinalFiles& list,
      const std::vector<FileHeader>& headers, const FinalRing& ring,
      const std::vector<RingSource>& sources, int64_t rank, Job* job,
      std::vector<RingEdge>* edges);

  struct Tensor {
    uint32_t file = 0;
    ByteRange bytes;  // of the file
  };
  struct Piece {
    uint32_t file = 0;
    ByteRange bytes;
  };
  // A box of a member.
  struct Flow {
    size_t tensor = 0;
    ByteBox box;
    size_t number = 0;  // in the list of boxes
    uint64_t at = 0;    // own: in own()
  };
  // The tensors, files and pieces.
  void PlanTensors(const FinalFiles& list,
                   const std::vector<FileHeader>& headers,
                   const std::vector<RingTensor>& tensors);
  // By tensor.
  static Result<std::vector<Flow>> FlowsOf(
      const std::vector<RingBox>& boxes,
      const std::vector<RingTensor>& tensors);
  void PlanEdges(const std::vector<size_t>& sources,
                 std::vector<RingEdge>* edges) const;
  Result<uint64_t> PieceAt(size_t file, uint64_t begin) const;
  // Calls fn(flow, begin, end) for what each of `flows`, in their order, has in
  // the piece: bytes [begin, end) of its box.
  template <class Fn>
  void ForEachOf(const std::vector<Flow>& flows, const Piece& piece,
                 const Fn& fn) const;

  bool leads_ = false;
  std::vector<Tensor> tensors_;  // by file and place
  std::vector<OutputSpec> files_;
  std::vector<Piece> pieces_;
  std::vector<RingPeer> peers_;
  std::vector<std::vector<Flow>> peer_flows_;  // by peer, each by tensor
  std::vector<Flow> own_flows_;
  SourceBytes own_;
};

// Meets the other members. Nothing where there will be no ring.
Result<std::optional<RingWork>> PlanRingWork(
    const Directory& staging, const FinalFiles& list,
    const std::vector<FileHeader>& headers, const FinalRing& ring,
    const std::vector<RingSource>& sources, int64_t rank, Job* job,
    std::vector<RingEdge>* edges);

}  // namespace torch_ckpt
