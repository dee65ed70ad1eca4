// Bands of tensors that the ranks of one node have: the members of a ring send
// what they have of them, through shared memory, to their leader, which writes
// whole pieces. No system call a row, and no block that two ranks write.
//
// The pieces are those of WriteOutputs over the bytes of these tensors, and all
// members know them from the staged headers. Of each piece a sender has one
// message: what its boxes have in it, one box after the other. Messages go
// through the slots of engine/save/ring_link.h in the order of the pieces.
//
// The first and last bytes of a stretch of tensors, which share a block with
// what others write, go to the spills of those who have them.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/save/ring_link.h"
#include "engine/write/extents.h"
#include "engine/write/joined_boxes.h"
#include "engine/write/output_files.h"
#include "engine/write/provider.h"

namespace torch_ckpt {

// A box of this rank that it does not write by itself, and its bytes.
struct RingSource {
  FinalPlace tensor;
  std::string_view name;
  Box box;  // in elements
  FinalBand band;
  Origin origin;
  uint64_t bytes = 0;
};

// Bytes of this rank that go to its spill: `range` of the file are
// those from `from` on of source `source`.
struct RingEdge {
  uint32_t file = 0;
  ByteRange range;
  size_t source = 0;
  uint64_t from = 0;
};

// One rank's part of it: of a sender what it sends, of the leader the provider
// of the bands, whose things are the ring's tensors by their number.
class RingWork final : public Provider {
 public:
  bool leads() const { return leads_; }
  // How many bytes this rank has of them.
  uint64_t own_bytes() const { return own_bytes_; }

  // Sender: sends all messages, by workers that count from 0. Errors are those
  // of the providers, and kCancelled, also where the leader is gone.
  Status Send(int workers, Job* job) const;

  // What the leader writes of a file, by its position in the list of final
  // files; and fn(number, bytes of the file) for the tensors there.
  const std::vector<ByteRange>& RangesOf(uint32_t file) const {
    return ranges_[file];
  }
  template <class Fn>
  void ForEachTensor(uint32_t file, const Fn& fn) const {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (tensors_[t].file == file) fn(t, tensors_[t].bytes);
    }
  }

  uint64_t ScratchBytes() const override { return own_->ScratchBytes(); }
  PageLocker* Locker() const override { return own_->Locker(); }
  // Leader: waits until all members have sent what they have of the piece.
  Status Await(const std::vector<Stretch>& stretches, const Job& job) override;
  // REQUIRES: the stretches are all that the ring has of a piece.
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  friend Result<std::unique_ptr<RingWork>> PlanRingWork(
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
  // The tensors, ranges and pieces.
  void PlanTensors(const std::vector<FileHeader>& headers,
                   const std::vector<RingTensor>& tensors);
  // Of the ring's boxes that have bytes, by tensor; `numbers` are their places
  // in `boxes`.
  static Result<std::vector<JoinedBox>> BoxesOf(
      const std::vector<RingBox>& boxes, const std::vector<RingTensor>& tensors,
      std::vector<size_t>* numbers);
  void PlanEdges(const std::vector<size_t>& sources,
                 std::vector<RingEdge>* edges) const;
  // The piece that a stretch is in, and the stretches of a piece.
  uint64_t PieceOf(const Stretch& stretch) const;
  std::vector<Stretch> StretchesOf(const Piece& piece) const;

  bool leads_ = false;
  std::vector<Tensor> tensors_;                 // by file and place
  std::vector<std::vector<ByteRange>> ranges_;  // by file
  std::vector<Piece> pieces_;
  std::vector<RingPeer> peers_;
  std::vector<std::vector<JoinedBox>> peer_boxes_;  // by peer, no origins
  std::optional<JoinedBoxes> own_;
  uint64_t own_bytes_ = 0;
};

// Meets the other members. Nothing where there will be no ring.
Result<std::unique_ptr<RingWork>> PlanRingWork(
    const Directory& staging, const FinalFiles& list,
    const std::vector<FileHeader>& headers, const FinalRing& ring,
    const std::vector<RingSource>& sources, int64_t rank, Job* job,
    std::vector<RingEdge>* edges);

}  // namespace torch_ckpt
