#include "engine/ring_write.h"

#include <algorithm>
#include <numeric>

#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// Small enough that a step is digested while it is in the cache.
constexpr uint64_t kStepBytes = uint64_t{256} << 10;

}  // namespace

void RingWork::PlanTensors(const FinalFiles& list,
                           const std::vector<FileHeader>& headers,
                           const std::vector<RingTensor>& tensors) {
  auto tensor = tensors.begin();
  for (uint32_t f = 0; f < headers.size(); ++f) {
    const SafetensorsHeader& header = headers[f].header;
    std::vector<ByteRange> rows;  // of tensors that lie side by side
    for (; tensor != tensors.end() && tensor->of.file == f; ++tensor) {
      const ByteRange bytes{header.data_begin + tensor->entry.begin,
                            header.data_begin + tensor->entry.end};
      tensors_.push_back({f, bytes});
      if (bytes.begin == bytes.end) continue;
      if (rows.empty() || rows.back().end != bytes.begin) rows.push_back(bytes);
      rows.back().end = bytes.end;
    }
    std::vector<ByteRange> ranges;
    for (const ByteRange& row : rows) {
      const ByteRange own = Interior(row, header.file_bytes);
      if (own.begin < own.end) ranges.push_back(own);
    }
    for (const ByteRange& range : ranges) {
      ForEachPiece(range, [&](uint64_t begin, uint64_t end) {
        pieces_.push_back({f, {begin, end}});
      });
    }
    files_.push_back({list.files[f].name, list.files[f].staged,
                      list.files[f].id, FileRole::kData, header.file_bytes,
                      std::move(ranges)});
  }
}

Result<std::vector<RingWork::Flow>> RingWork::FlowsOf(
    const std::vector<RingBox>& boxes, const std::vector<RingTensor>& tensors) {
  // All members in one order.
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return boxes[a].tensor < boxes[b].tensor;
  });
  std::vector<Flow> flows;
  flows.reserve(order.size());
  for (const size_t b : order) {
    const auto& [tensor, box] = boxes[b];
    if (box.Empty()) continue;  // no bytes
    const SafetensorsEntry& entry = tensors[tensor].entry;
    TC_ASSIGN_OR_RETURN(const ByteBox bytes,
                        ByteBox::Make(entry.dtype, entry.shape, box));
    flows.push_back({tensor, bytes, b, 0});
  }
  return flows;
}

void RingWork::PlanEdges(const std::vector<size_t>& sources,
                         std::vector<RingEdge>* edges) const {
  for (const Flow& flow : own_flows_) {
    const Tensor& tensor = tensors_[flow.tensor];
    const auto add = [&](uint64_t begin, uint64_t end) {
      if (begin >= end) return;
      const uint64_t origin = tensor.bytes.begin;
      uint64_t from = flow.box.Before(begin - origin);
      const uint64_t bytes = flow.box.Before(end - origin) - from;
      flow.box.ForEachRow(from, bytes, [&](uint64_t at, uint64_t part) {
        edges->push_back({tensor.file,
                          {origin + at, origin + at + part},
                          sources[flow.number],
                          from});
        from += part;
      });
    };
    const std::vector<ByteRange>& ranges = *files_[tensor.file].ranges;
    uint64_t at = tensor.bytes.begin;
    for (auto range = std::partition_point(
             ranges.begin(), ranges.end(),
             [&](const ByteRange& written) { return written.end <= at; });
         range != ranges.end() && range->begin < tensor.bytes.end; ++range) {
      add(at, range->begin);
      at = std::min(range->end, tensor.bytes.end);
    }
    add(at, tensor.bytes.end);
  }
}

Result<uint64_t> RingWork::PieceAt(size_t file, uint64_t begin) const {
  const auto found = std::lower_bound(
      pieces_.begin(), pieces_.end(), begin,
      [&](const Piece& piece, uint64_t at) {
        return piece.file != file ? piece.file < file : piece.bytes.begin < at;
      });
  if (found == pieces_.end() || found->file != file ||
      found->bytes.begin != begin) {
    return Internal("is not written in the pieces that were planned");
  }
  return static_cast<uint64_t>(found - pieces_.begin());
}

template <class Fn>
void RingWork::ForEachOf(const std::vector<Flow>& flows, const Piece& piece,
                         const Fn& fn) const {
  // The first tensor that reaches into the piece.
  const auto first = std::upper_bound(
      tensors_.begin(), tensors_.end(), piece,
      [](const Piece& a, const Tensor& b) {
        return a.file != b.file ? a.file < b.file : a.bytes.begin < b.bytes.end;
      });
  auto flow = std::lower_bound(
      flows.begin(), flows.end(), static_cast<size_t>(first - tensors_.begin()),
      [](const Flow& a, size_t tensor) { return a.tensor < tensor; });
  for (; flow != flows.end(); ++flow) {
    const Tensor& tensor = tensors_[flow->tensor];
    if (tensor.file != piece.file || tensor.bytes.begin >= piece.bytes.end) {
      return;
    }
    const uint64_t origin = tensor.bytes.begin;
    const uint64_t begin = std::max(piece.bytes.begin, origin) - origin;
    const uint64_t end = std::min(piece.bytes.end, tensor.bytes.end) - origin;
    fn(*flow, flow->box.Before(begin), flow->box.Before(end));
  }
}

Status RingWork::Send(int workers, Job* job, const Make& make) const {
  const RingPeer& leader = peers_[0];
  return ForEachItem(
      workers, static_cast<int64_t>(pieces_.size()), job,
      [&](int64_t item, int worker) -> Status {
        const auto i = static_cast<uint64_t>(item);
        TC_RETURN_IF_ERROR(leader.slots.WaitFree(i, leader.Patience(*job)));
        std::byte* to = leader.slots.slot(i);
        Status status;
        ForEachOf(own_flows_, pieces_[i],
                  [&](const Flow& flow, uint64_t begin, uint64_t end) {
                    if (!status.ok() || begin == end) return;
                    status = make(flow.at + begin, {to, end - begin}, worker);
                    to += end - begin;
                  });
        TC_RETURN_IF_ERROR(std::move(status));
        leader.slots.Fill(i);
        return {};
      });
}

Status RingWork::Await(size_t file, uint64_t begin, const Job& job) const {
  TC_ASSIGN_OR_RETURN(const uint64_t i, PieceAt(file, begin));
  for (const RingPeer& peer : peers_) {
    TC_RETURN_IF_ERROR(peer.slots.WaitFilled(i, peer.Patience(job)));
  }
  return {};
}

Status RingWork::Fill(size_t file, MutableByteSpan out, MutableByteSpan scratch,
                      int worker, SegmentDigester* digester,
                      const Make& make) const {
  const uint64_t begin = digester->offset();
  TC_ASSIGN_OR_RETURN(const uint64_t i, PieceAt(file, begin));
  const Piece& piece = pieces_[i];
  if (piece.bytes.end != begin + out.size()) {
    return Internal("is not written in whole pieces");
  }
  // Of each box what it has in the piece, from where it is.
  struct Stream {
    const Flow* flow;
    const std::byte* bytes;
    uint64_t next;  // byte of the box
  };
  std::vector<Stream> streams;
  Status status;
  uint64_t made = 0;
  ForEachOf(own_flows_, piece,
            [&](const Flow& flow, uint64_t from, uint64_t to) {
              if (!status.ok() || from == to) return;
              const std::byte* dense = nullptr;
              (void)own_.ForEachPart(flow.at + from, to - from,
                                     [&](const SourcePart& part) -> Status {
                                       dense = part.dense;
                                       return {};
                                     });
              if (dense == nullptr) {
                const MutableByteSpan room = scratch.subspan(made, to - from);
                status = make(flow.at + from, room, worker);
                dense = room.data();
                made += room.size();
              }
              streams.push_back({&flow, dense, from});
            });
  TC_RETURN_IF_ERROR(std::move(status));
  for (size_t p = 0; p < peers_.size(); ++p) {
    const std::byte* message = peers_[p].slots.slot(i);
    ForEachOf(peer_flows_[p], piece,
              [&](const Flow& flow, uint64_t from, uint64_t to) {
                streams.push_back({&flow, message, from});
                message += to - from;
              });
  }
  for (uint64_t at = begin; at < piece.bytes.end; at += kStepBytes) {
    const uint64_t end = std::min(piece.bytes.end, at + kStepBytes);
    for (Stream& stream : streams) {
      const ByteRange& tensor = tensors_[stream.flow->tensor].bytes;
      if (tensor.begin >= end || tensor.end <= at) continue;
      // Positions in the tensor.
      const uint64_t first = std::max(at, tensor.begin) - tensor.begin;
      const uint64_t last = std::min(end, tensor.end) - tensor.begin;
      const uint64_t until = stream.flow->box.Before(last);
      stream.flow->box.Scatter(stream.next, until - stream.next, stream.bytes,
                               out.data() + (tensor.begin + first - begin),
                               first);
      stream.bytes += until - stream.next;
      stream.next = until;
    }
    digester->Add({out.data() + (at - begin), end - at});
  }
  for (const RingPeer& peer : peers_) peer.slots.Free(i);
  return {};
}

Result<std::optional<RingWork>> PlanRingWork(
    const Directory& staging, const FinalFiles& list,
    const std::vector<FileHeader>& headers, const FinalRing& ring,
    const std::vector<RingSource>& sources, int64_t rank, Job* job,
    std::vector<RingEdge>* edges) {
  // Before anybody waits for this rank: what may take long or fail.
  TC_ASSIGN_OR_RETURN(const std::vector<RingTensor> tensors,
                      RingTensorsOf(list, headers, ring));
  RingWork work;
  work.PlanTensors(list, headers, tensors);
  std::vector<RingBox> boxes;
  std::vector<size_t> numbers;  // of their sources
  for (size_t s = 0; s < sources.size(); ++s) {
    const RingSource& source = sources[s];
    if (source.band.ring < 0) continue;
    const auto tensor = std::lower_bound(
        tensors.begin(), tensors.end(), source.tensor,
        [](const RingTensor& a, FinalPlace b) { return a.of < b; });
    boxes.push_back({static_cast<size_t>(tensor - tensors.begin()),
                     InBand(source.box, source.band)});
    numbers.push_back(s);
  }
  TC_ASSIGN_OR_RETURN(work.own_flows_, RingWork::FlowsOf(boxes, tensors));
  for (RingWork::Flow& flow : work.own_flows_) {
    const RingSource& source = sources[numbers[flow.number]];
    flow.at = work.own_.size();
    work.own_.Place(flow.at, *source.source, 0, source.bytes, source.cast);
  }
  work.leads_ = rank == ring.leader;
  TC_ASSIGN_OR_RETURN(work.peers_,
                      work.leads_
                          ? LeadRing(staging, list, tensors, ring, boxes, job)
                          : JoinRing(staging, list, ring, rank, boxes, job));
  if (work.peers_.empty()) return std::optional<RingWork>();
  if (work.leads_) {
    for (const RingPeer& peer : work.peers_) {
      TC_ASSIGN_OR_RETURN(std::vector<RingWork::Flow> flows,
                          RingWork::FlowsOf(peer.boxes, tensors));
      work.peer_flows_.push_back(std::move(flows));
    }
  }
  work.PlanEdges(numbers, edges);
  return std::optional<RingWork>(std::move(work));
}

}  // namespace torch_ckpt
