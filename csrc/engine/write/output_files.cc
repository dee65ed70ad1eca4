#include "engine/write/output_files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>

#include "base/checked.h"
#include "engine/write/fill.h"
#include "format/safetensors/safetensors.h"
#include "os/byte_sink.h"
#include "plan/ranges.h"
#include "runtime/adopted.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// Nobody but a save that supersedes this one removes its directory, with all
// that it has made there.
Status WhereItWent(const Directory& staging, Status status) {
  const int error = status.sys_errno();
  if (error != ENOENT && error != ESTALE) return status;
  return Conflict("another save to this path has begun since: " +
                  status.ToString())
      .WithFile(staging.path());
}

Status CheckRange(const StagedFile& file, const ByteRange& range) {
  const auto [begin, end] = range;
  if (begin < end && end <= file.bytes && begin % kWriterBlock == 0 &&
      (end % kWriterBlock == 0 || end == file.bytes)) {
    return {};
  }
  return Internal("cannot write bytes " + std::to_string(begin) + " to " +
                  std::to_string(end) + " by themselves")
      .WithFile(file.name);
}

// Where a piece lies in a snapshot, aligned so that it can be written from
// there; empty where a part of it does not, or where writing so many short
// stretches would take longer than copying them together.
std::vector<ByteSpan> SnapshotPlaces(
    const std::vector<ProviderStretches>& asked) {
  constexpr size_t kMaxPlaces = 16;
  std::vector<ByteSpan> places;
  // Of several providers only one has snapshots.
  if (asked.size() != 1) return places;
  for (const Stretch& stretch : asked[0].stretches) {
    const std::byte* const found = asked[0].provider->Find(stretch);
    if (found == nullptr) return {};
    if (!places.empty() &&
        places.back().data() + places.back().size() == found) {
      places.back() = {places.back().data(),
                       places.back().size() + stretch.bytes};
    } else {
      if (places.size() == kMaxPlaces) return {};
      places.push_back({found, stretch.bytes});
    }
  }
  const auto fits = [](const ByteSpan& place) {
    return reinterpret_cast<uintptr_t>(place.data()) % kDataAlignment == 0 &&
           place.size() % kDataAlignment == 0 &&
           (Arena::Snapshots().IsLeased(place) ||
            AdoptedMemory::Process().Holds(place));
  };
  return std::all_of(places.begin(), places.end(), fits)
             ? places
             : std::vector<ByteSpan>();
}

// One call of WriteOutputs.
class OutputWriter {
 public:
  OutputWriter(const Directory& staging, const std::vector<Output>& outputs,
               const OutputOptions& options, Job* job, int first_worker)
      : staging_(staging),
        outputs_(outputs),
        options_(options),
        job_(job),
        first_worker_(first_worker),
        providers_(ListsOf(outputs)),
        sinks_(outputs.size()) {}

  // Cuts what is to be written into pieces.
  Status Plan() {
    written_.resize(outputs_.size());
    for (size_t f = 0; f < outputs_.size(); ++f) {
      const StagedFile& file = outputs_[f].file;
      if (outputs_[f].ranges) {
        for (const ByteRange& range : *outputs_[f].ranges) {
          TC_RETURN_IF_ERROR(CheckRange(file, range));
          written_[f].push_back({range, {}});
        }
      } else {
        written_[f].push_back({{0, file.bytes}, {}});
        // It is to be there, whether it has a piece or not.
        if (file.bytes == 0) pieces_.push_back({f, 0, 0, nullptr});
      }
      for (WrittenRange& range : written_[f]) AddPieces(f, &range);
    }
    for (const Piece& piece : pieces_) ++sinks_[piece.file].left;
    return {};
  }

  Status Run() {
    for (const Output& output : outputs_) {
      if (output.ranges) continue;
      TC_RETURN_IF_ERROR(CreateOutput(staging_, output.file));
    }
    const int workers = static_cast<int>(std::min<uint64_t>(
        static_cast<uint64_t>(std::max(1, options_.workers)), pieces_.size()));
    return ForEachItem(workers, static_cast<int64_t>(pieces_.size()), job_,
                       [&](int64_t i, int worker) {
                         return WritePiece(pieces_[static_cast<size_t>(i)],
                                           first_worker_ + worker);
                       });
  }

  // Best effort: the next save wipes the staging directory anyway, and the
  // first error is the one to report.
  void Undo() const {
    for (const Output& output : outputs_) {
      if (output.ranges) continue;
      (void)staging_.Unlink(output.file.staged, true);
    }
  }

  std::vector<std::vector<WrittenRange>> TakeWritten() {
    return std::move(written_);
  }

 private:
  struct Piece {
    size_t file;
    uint64_t begin;
    uint64_t bytes;
    uint32_t* digests;  // of the segments from that of `begin` on
  };
  struct Sink {
    std::mutex opening;
    std::unique_ptr<ByteSink> sink;  // open from its first piece to its last
    std::atomic<uint64_t> left{0};   // pieces of this call not yet written
  };

  static std::vector<const ExtentList*> ListsOf(
      const std::vector<Output>& outputs) {
    std::vector<const ExtentList*> lists;
    lists.reserve(outputs.size());
    for (const Output& output : outputs) lists.push_back(&output.extents);
    return lists;
  }

  void AddPieces(size_t file, WrittenRange* range) {
    range->crc32c.resize(SegmentCount(range->bytes));
    const uint64_t first = range->bytes.begin / kSegmentBytes;
    ForEachPiece(range->bytes, [&](uint64_t begin, uint64_t end) {
      pieces_.push_back({file, begin, end - begin,
                         &range->crc32c[begin / kSegmentBytes - first]});
      job_->AddTotal(end - begin);
    });
  }

  Status OpenOnce(const StagedFile& file, Sink* sink) const {
    std::lock_guard<std::mutex> lock(sink->opening);
    if (sink->sink) return {};
    auto opened =
        ByteSink::Open(staging_, file.staged, file.bytes, options_.direct_io);
    if (!opened.ok()) return WhereItWent(staging_, opened.status());
    sink->sink = std::move(opened).value();
    return {};
  }

  Status WritePiece(const Piece& piece, int worker) {
    const StagedFile& file = outputs_[piece.file].file;
    Sink* const sink = &sinks_[piece.file];
    TC_RETURN_IF_ERROR(OpenOnce(file, sink));
    TC_RETURN_IF_ERROR(
        WriteBytes(piece, sink->sink.get(), worker).WithFile(file.name));
    job_->AddDone(piece.bytes);
    if (--sink->left > 0) return {};
    Status closed = sink->sink->Close(options_.sync);
    sink->sink.reset();
    return closed;
  }

  Status WriteBytes(const Piece& piece, ByteSink* sink, int worker) const {
    SegmentDigester digester(piece.digests, piece.begin);
    const std::vector<ProviderStretches> asked = StretchesByProvider(
        outputs_[piece.file].extents, piece.begin, piece.bytes);
    TC_RETURN_IF_ERROR(AwaitStretches(asked, *job_));
    OutputCrcs* const crcs = outputs_[piece.file].crcs;
    const std::vector<ByteSpan> places = SnapshotPlaces(asked);
    for (const ByteSpan& bytes : places) {
      TC_RETURN_IF_ERROR(sink->Write(bytes, digester.offset()));
      if (crcs) crcs->Add(digester.offset(), bytes);
      digester.Add(bytes);
    }
    if (!places.empty()) return {};
    // One lease for both: a worker that held one and waited for the other could
    // wait for ever.
    TC_ASSIGN_OR_RETURN(
        const ArenaLease lease,
        LeaseBuffer(kPieceBytes + providers_.scratch_bytes(), job_));
    // Speed only: a system may forbid or limit locked memory.
    if (PageLocker* locker = providers_.locker()) {
      (void)lease.PageLock(locker, 0, lease.size());
    }
    const MutableByteSpan bytes = lease.span().first(piece.bytes);
    FillBuffer buffer(bytes, piece.begin, worker,
                      FillBuffer::Copies::kDigested);
    TC_RETURN_IF_ERROR(
        FillStretches(asked, lease.span().subspan(kPieceBytes), &buffer));
    buffer.Digest(&digester);
    if (crcs) crcs->Add(piece.begin, bytes);
    return sink->Write(bytes, piece.begin);
  }

  const Directory& staging_;
  const std::vector<Output>& outputs_;
  const OutputOptions& options_;
  Job* const job_;
  const int first_worker_;
  const Providers providers_;
  std::vector<Piece> pieces_;
  std::vector<Sink> sinks_;
  std::vector<std::vector<WrittenRange>> written_;
};

}  // namespace

ByteRange Interior(const ByteRange& range, uint64_t file_bytes) {
  const uint64_t begin = RoundUp(range.begin, kWriterBlock);
  const uint64_t end =
      range.end == file_bytes ? range.end : RoundDown(range.end, kWriterBlock);
  return {begin, std::max(begin, end)};
}

void TakeShare(std::vector<Output>* outputs, int share, int shares) {
  // A multiple of kWriterBlock, and small beside what a writer gets of any file
  // that is worth dividing.
  constexpr uint64_t kGrain = uint64_t{64} << 10;
  uint64_t total = 0;
  for (Output& output : *outputs) {
    if (!output.ranges) {
      output.ranges.emplace();
      const uint64_t bytes = output.file.bytes;
      if (bytes > 0) output.ranges->push_back({0, bytes});
    }
    for (const auto& [begin, end] : *output.ranges) {
      total += RoundUp(end - begin, kGrain);
    }
  }
  const std::vector<uint64_t> cuts = BalancedCuts(total, shares, kGrain);
  const uint64_t first = cuts[static_cast<size_t>(share)];
  const uint64_t last = cuts[static_cast<size_t>(share) + 1];
  uint64_t at = 0;  // of the range, counted through all of them
  for (Output& output : *outputs) {
    std::vector<ByteRange> own;
    for (const auto& [begin, end] : *output.ranges) {
      const uint64_t next = at + RoundUp(end - begin, kGrain);
      const uint64_t from = begin + std::clamp(first, at, next) - at;
      const uint64_t to =
          std::min(end, begin + std::clamp(last, at, next) - at);
      if (from < to) own.push_back({from, to});
      at = next;
    }
    output.ranges = std::move(own);
  }
}

Status CreateOutput(const Directory& staging, const StagedFile& file) {
  return WhereItWent(staging,
                     ByteSink::Create(staging, file.staged, file.bytes));
}

Result<std::vector<std::vector<WrittenRange>>> WriteOutputs(
    const Directory& staging, const std::vector<Output>& outputs,
    const OutputOptions& options, Job* job, int first_worker) {
  OutputWriter writer(staging, outputs, options, job, first_worker);
  TC_RETURN_IF_ERROR(writer.Plan());
  Status status = writer.Run();
  if (!status.ok()) {
    writer.Undo();
    return status;
  }
  return writer.TakeWritten();
}

}  // namespace torch_ckpt
