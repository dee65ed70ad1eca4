#include "engine/save/ring_write.h"

#include <algorithm>
#include <numeric>

#include "engine/write/fill.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {
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

Result<std::vector<JoinedBox>> RingWork::BoxesOf(
    const std::vector<RingBox>& boxes, const std::vector<RingTensor>& tensors,
    std::vector<size_t>* numbers) {
  // All members in one order.
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return boxes[a].tensor < boxes[b].tensor;
  });
  std::vector<JoinedBox> joined;
  joined.reserve(order.size());
  for (const size_t b : order) {
    const auto& [tensor, box] = boxes[b];
    if (box.Empty()) continue;  // no bytes
    const SafetensorsEntry& entry = tensors[tensor].entry;
    TC_ASSIGN_OR_RETURN(const ByteBox bytes,
                        ByteBox::Make(entry.dtype, entry.shape, box));
    joined.push_back({tensor, bytes, {}});
    numbers->push_back(b);
  }
  return joined;
}

void RingWork::PlanEdges(const std::vector<size_t>& sources,
                         std::vector<RingEdge>* edges) const {
  for (size_t b = 0; b < sources.size(); ++b) {
    const ByteBox& box = own_->boxes()[b].box;
    const Tensor& tensor = tensors_[own_->boxes()[b].tensor];
    const auto add = [&](uint64_t begin, uint64_t end) {
      if (begin >= end) return;
      const uint64_t origin = tensor.bytes.begin;
      uint64_t from = box.Before(begin - origin);
      const uint64_t bytes = box.Before(end - origin) - from;
      box.ForEachRow(from, bytes, [&](uint64_t at, uint64_t part) {
        edges->push_back(
            {tensor.file, {origin + at, origin + at + part}, sources[b], from});
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

std::vector<Stretch> RingWork::StretchesOf(const Piece& piece) const {
  auto tensor = std::upper_bound(
      tensors_.begin(), tensors_.end(), piece,
      [](const Piece& a, const Tensor& b) {
        return a.file != b.file ? a.file < b.file : a.bytes.begin < b.bytes.end;
      });
  std::vector<Stretch> stretches;
  for (; tensor != tensors_.end() && tensor->file == piece.file &&
         tensor->bytes.begin < piece.bytes.end;
       ++tensor) {
    const uint64_t begin = std::max(piece.bytes.begin, tensor->bytes.begin);
    const uint64_t end = std::min(piece.bytes.end, tensor->bytes.end);
    if (begin >= end) continue;
    stretches.push_back({static_cast<uint64_t>(tensor - tensors_.begin()),
                         begin - tensor->bytes.begin, end - begin,
                         begin - piece.bytes.begin});
  }
  return stretches;
}

Status RingWork::Send(int workers, Job* job) const {
  const RingPeer& leader = peers_[0];
  const auto send = [&](int64_t item, int worker) -> Status {
    const auto i = static_cast<uint64_t>(item);
    ExtentList message;
    for (const Stretch& stretch : StretchesOf(pieces_[i])) {
      ForEachBoxIn(own_->boxes(), stretch,
                   [&](const JoinedBox& box, uint64_t from, uint64_t to) {
                     message.Place(message.size(), to - from, box.origin, from);
                   });
    }
    TC_RETURN_IF_ERROR(leader.slots.WaitFree(i, leader.Patience(*job)));
    ArenaLease scratch;
    if (own_->origin_scratch() > 0) {
      TC_ASSIGN_OR_RETURN(scratch, LeaseBuffer(own_->origin_scratch(), job));
    }
    FillBuffer buffer({leader.slots.slot(i), message.size()}, 0, worker,
                      FillBuffer::Copies::kCached);
    TC_RETURN_IF_ERROR(
        FillStretches(StretchesByProvider(message, 0, message.size()),
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

Status RingWork::Fill(const std::vector<Stretch>& stretches,
                      MutableByteSpan scratch, FillBuffer* buffer) {
  const uint64_t i = PieceOf(stretches.front());
  const Piece& piece = pieces_[i];
  if (piece.bytes.end - piece.bytes.begin != buffer->size()) {
    return Internal("is not written in the pieces that were planned");
  }
  std::vector<std::vector<BoxCursor>> cursors;
  TC_RETURN_IF_ERROR(
      own_->Gather(stretches, scratch, buffer->worker(), &cursors));
  std::vector<const std::byte*> messages;
  for (const RingPeer& peer : peers_) messages.push_back(peer.slots.slot(i));
  for (size_t s = 0; s < stretches.size(); ++s) {
    for (size_t p = 0; p < peers_.size(); ++p) {
      ForEachBoxIn(peer_boxes_[p], stretches[s],
                   [&](const JoinedBox& box, uint64_t from, uint64_t to) {
                     cursors[s].push_back({&box.box, from, messages[p]});
                     messages[p] += to - from;
                   });
    }
    FillFromBoxes(stretches[s], &cursors[s], buffer);
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
  std::vector<size_t> places;  // in `boxes`, then in the sources
  TC_ASSIGN_OR_RETURN(std::vector<JoinedBox> own,
                      RingWork::BoxesOf(boxes, tensors, &places));
  for (size_t b = 0; b < own.size(); ++b) {
    places[b] = numbers[places[b]];
    own[b].origin = sources[places[b]].origin;
    work->own_bytes_ += sources[places[b]].bytes;
  }
  work->own_.emplace(std::move(own));
  work->leads_ = rank == ring.leader;
  TC_ASSIGN_OR_RETURN(work->peers_,
                      work->leads_
                          ? LeadRing(staging, list, tensors, ring, boxes, job)
                          : JoinRing(staging, list, ring, rank, boxes, job));
  if (work->peers_.empty()) return std::unique_ptr<RingWork>();
  if (work->leads_) {
    for (const RingPeer& peer : work->peers_) {
      std::vector<size_t> unused;
      TC_ASSIGN_OR_RETURN(std::vector<JoinedBox> of_peer,
                          RingWork::BoxesOf(peer.boxes, tensors, &unused));
      work->peer_boxes_.push_back(std::move(of_peer));
    }
  }
  work->PlanEdges(places, edges);
  return work;
}

}  // namespace torch_ckpt
