#include "engine/save/ring_write.h"

#include <algorithm>
#include <numeric>

#include "engine/write/fill.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// Small enough that a step is digested while it is in the cache.
constexpr uint64_t kStepBytes = uint64_t{256} << 10;

}  // namespace

void RingWork::PlanTensors(const std::vector<FileHeader>& headers,
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
    std::vector<ByteRange>& ranges = ranges_.emplace_back();
    for (const ByteRange& row : rows) {
      const ByteRange own = Interior(row, header.file_bytes);
      if (own.begin < own.end) ranges.push_back(own);
    }
    for (const ByteRange& range : ranges) {
      ForEachPiece(range, [&](uint64_t begin, uint64_t end) {
        pieces_.push_back({f, {begin, end}});
      });
    }
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
    flows.push_back({tensor, bytes, b, {}});
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
    const std::vector<ByteRange>& ranges = ranges_[tensor.file];
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

uint64_t RingWork::PieceOf(const Stretch& stretch) const {
  const Tensor& tensor = tensors_[stretch.index];
  const uint64_t at = tensor.bytes.begin + stretch.from;
  const auto after = std::partition_point(
      pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
        return piece.file != tensor.file ? piece.file < tensor.file
                                         : piece.bytes.begin <= at;
      });
  return static_cast<uint64_t>(after - pieces_.begin()) - 1;
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

Status RingWork::Send(int workers, Job* job) const {
  const RingPeer& leader = peers_[0];
  const auto send = [&](int64_t item, int worker) -> Status {
    const auto i = static_cast<uint64_t>(item);
    ExtentList message;
    ForEachOf(own_flows_, pieces_[i],
              [&](const Flow& flow, uint64_t begin, uint64_t end) {
                message.Place(message.size(), end - begin, flow.origin, begin);
              });
    TC_RETURN_IF_ERROR(leader.slots.WaitFree(i, leader.Patience(*job)));
    ArenaLease scratch;
    if (own_scratch_ > 0) {
      TC_ASSIGN_OR_RETURN(scratch, LeaseBuffer(own_scratch_, job));
    }
    FillBuffer buffer({leader.slots.slot(i), message.size()}, 0, worker,
                      FillBuffer::Copies::kCached);
    TC_RETURN_IF_ERROR(FillPortions(PortionsOf(message, 0, message.size()),
                                    scratch.span(), &buffer));
    leader.slots.Fill(i);
    return {};
  };
  return ForEachItem(workers, static_cast<int64_t>(pieces_.size()), job, send);
}

Status RingWork::Await(const std::vector<Stretch>& stretches, const Job& job) {
  const uint64_t i = PieceOf(stretches.front());
  for (const RingPeer& peer : peers_) {
    TC_RETURN_IF_ERROR(peer.slots.WaitFilled(i, peer.Patience(job)));
  }
  return {};
}

Status RingWork::AddOwn(const Piece& piece, MutableByteSpan room,
                        MutableByteSpan scratch, int worker,
                        std::vector<Stream>* streams) const {
  ExtentList made;  // in `room`
  ForEachOf(
      own_flows_, piece, [&](const Flow& flow, uint64_t from, uint64_t to) {
        if (from == to) return;
        const std::byte* found =
            flow.origin.provider->Find({flow.origin.index, from, to - from, 0});
        if (found == nullptr) {
          found = room.data() + made.size();
          made.Place(made.size(), to - from, flow.origin, from);
        }
        streams->push_back({&flow, found, from});
      });
  FillBuffer buffer(room.first(made.size()), 0, worker,
                    FillBuffer::Copies::kCached);
  return FillPortions(PortionsOf(made, 0, made.size()), scratch, &buffer);
}

void RingWork::Scatter(const Piece& piece, uint64_t at, uint64_t end,
                       std::vector<Stream>* streams, FillBuffer* buffer) const {
  const uint64_t begin = piece.bytes.begin;
  for (Stream& stream : *streams) {
    const ByteRange& tensor = tensors_[stream.flow->tensor].bytes;
    if (tensor.begin >= end || tensor.end <= at) continue;
    // Positions in the tensor.
    const uint64_t first = std::max(at, tensor.begin) - tensor.begin;
    const uint64_t last = std::min(end, tensor.end) - tensor.begin;
    const uint64_t until = stream.flow->box.Before(last);
    std::byte* const to =
        buffer->Out(tensor.begin + first - begin, last - first).data();
    stream.flow->box.Scatter(stream.next, until - stream.next, stream.bytes, to,
                             first);
    buffer->Filled(until - stream.next);
    stream.bytes += until - stream.next;
    stream.next = until;
  }
  buffer->Made(at - begin, end - at);
}

Status RingWork::Fill(const std::vector<Stretch>& stretches,
                      MutableByteSpan scratch, FillBuffer* buffer) {
  const uint64_t i = PieceOf(stretches.front());
  const Piece& piece = pieces_[i];
  if (piece.bytes.end - piece.bytes.begin != buffer->size()) {
    return Internal("is not written in the pieces that were planned");
  }
  std::vector<Stream> streams;
  TC_RETURN_IF_ERROR(AddOwn(piece, scratch.first(kPieceBytes),
                            scratch.subspan(kPieceBytes), buffer->worker(),
                            &streams));
  for (size_t p = 0; p < peers_.size(); ++p) {
    const std::byte* message = peers_[p].slots.slot(i);
    ForEachOf(peer_flows_[p], piece,
              [&](const Flow& flow, uint64_t from, uint64_t to) {
                streams.push_back({&flow, message, from});
                message += to - from;
              });
  }
  for (uint64_t at = piece.bytes.begin; at < piece.bytes.end;
       at += kStepBytes) {
    Scatter(piece, at, std::min(piece.bytes.end, at + kStepBytes), &streams,
            buffer);
  }
  for (const RingPeer& peer : peers_) peer.slots.Free(i);
  return {};
}

Result<std::unique_ptr<RingWork>> PlanRingWork(
    const Directory& staging, const FinalFiles& list,
    const std::vector<FileHeader>& headers, const FinalRing& ring,
    const std::vector<RingSource>& sources, int64_t rank, Job* job,
    std::vector<RingEdge>* edges) {
  // Before anybody waits for this rank: what may take long or fail.
  TC_ASSIGN_OR_RETURN(const std::vector<RingTensor> tensors,
                      RingTensorsOf(list, headers, ring));
  auto work = std::make_unique<RingWork>();
  work->PlanTensors(headers, tensors);
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
  TC_ASSIGN_OR_RETURN(work->own_flows_, RingWork::FlowsOf(boxes, tensors));
  for (RingWork::Flow& flow : work->own_flows_) {
    const RingSource& source = sources[numbers[flow.number]];
    const Provider& provider = *source.origin.provider;
    flow.origin = source.origin;
    work->own_bytes_ += source.bytes;
    work->own_scratch_ = std::max(work->own_scratch_, provider.ScratchBytes());
    if (provider.Locker() != nullptr) work->own_locker_ = provider.Locker();
  }
  work->leads_ = rank == ring.leader;
  TC_ASSIGN_OR_RETURN(work->peers_,
                      work->leads_
                          ? LeadRing(staging, list, tensors, ring, boxes, job)
                          : JoinRing(staging, list, ring, rank, boxes, job));
  if (work->peers_.empty()) return std::unique_ptr<RingWork>();
  if (work->leads_) {
    for (const RingPeer& peer : work->peers_) {
      TC_ASSIGN_OR_RETURN(std::vector<RingWork::Flow> flows,
                          RingWork::FlowsOf(peer.boxes, tensors));
      work->peer_flows_.push_back(std::move(flows));
    }
  }
  work->PlanEdges(numbers, edges);
  return work;
}

}  // namespace torch_ckpt
