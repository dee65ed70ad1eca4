#include "engine/output_files.h"

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "base/checked.h"
#include "plan/ranges.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

struct Output {
  std::mutex opening;
  std::unique_ptr<ByteSink> sink;  // open from its first piece to its last
  std::atomic<uint64_t> left{0};   // pieces of this call not yet written
};

// Nobody but a save that supersedes this one removes its directory, with all
// that it has made there.
Status WhereItWent(const Directory& staging, Status status) {
  const int error = status.sys_errno();
  if (error != ENOENT && error != ESTALE) return status;
  return Conflict("another save into this directory has begun since: " +
                  status.ToString())
      .WithFile(staging.path());
}

Status Create(const Directory& staging, const OutputSpec& spec) {
  return WhereItWent(staging,
                     ByteSink::Create(staging, spec.staged, spec.bytes));
}

Status OpenOnce(const Directory& staging, const OutputSpec& spec,
                bool direct_io, Output* output) {
  std::lock_guard<std::mutex> lock(output->opening);
  if (output->sink) return {};
  auto sink = ByteSink::Open(staging, spec.staged, spec.bytes, direct_io);
  if (!sink.ok()) return WhereItWent(staging, sink.status());
  output->sink = std::move(sink).value();
  return {};
}

Status CheckRange(const OutputSpec& spec, const ByteRange& range) {
  const auto [begin, end] = range;
  if (begin < end && end <= spec.bytes && begin % kWriterBlock == 0 &&
      (end % kWriterBlock == 0 || end == spec.bytes)) {
    return {};
  }
  return Internal("cannot write bytes " + std::to_string(begin) + " to " +
                  std::to_string(end) + " by themselves")
      .WithFile(spec.name);
}

Status WritePiece(const OutputSpec& spec, ByteSink* sink, uint64_t begin,
                  MutableByteSpan piece, uint64_t bytes, size_t file,
                  MutableByteSpan scratch, int worker, const FillFn& fill,
                  uint64_t fill_bytes, uint32_t* digests) {
  SegmentDigester digester(digests, begin);
  for (uint64_t at = 0; at < bytes; at += fill_bytes) {
    TC_RETURN_IF_ERROR(fill(file,
                            piece.subspan(at, std::min(fill_bytes, bytes - at)),
                            scratch, worker, &digester));
  }
  if (digester.offset() != begin + bytes) {
    return Internal("not every byte of a piece was digested")
        .WithFile(spec.name);
  }
  return sink->Write(piece.first(bytes), begin);
}

// The same for a piece that is in memory already.
Status WritePlaced(ByteSink* sink, uint64_t begin,
                   const std::vector<ByteSpan>& placed, uint32_t* digests) {
  SegmentDigester digester(digests, begin);
  for (const ByteSpan& bytes : placed) {
    TC_RETURN_IF_ERROR(sink->Write(bytes, digester.offset()));
    digester.Add(bytes);
  }
  return {};
}

}  // namespace

template <class Step>
void SegmentDigester::EachSegment(size_t size, const Step& step) {
  for (size_t at = 0; at < size;) {
    const uint64_t inside = offset_ % kSegmentBytes;
    const auto part = static_cast<size_t>(
        std::min<uint64_t>(size - at, kSegmentBytes - inside));
    uint32_t& digest = digests_[offset_ / kSegmentBytes - first_segment_];
    digest = step(digest, at, part);
    offset_ += part;
    at += part;
  }
}

void SegmentDigester::Add(ByteSpan bytes) {
  EachSegment(bytes.size(), [&](uint32_t digest, size_t at, size_t size) {
    return Crc32c(digest, bytes.data() + at, size);
  });
}

void SegmentDigester::Add(uint32_t crc, size_t bytes) {
  EachSegment(bytes, [&](uint32_t digest, size_t, size_t size) {
    return Crc32cCombine(digest, crc, size);
  });
}

void SegmentDigester::Copy(std::byte* to, ByteSpan bytes) {
  EachSegment(bytes.size(), [&](uint32_t digest, size_t at, size_t size) {
    return Crc32cCopy(digest, to + at, bytes.data() + at, size);
  });
}

ByteRange Interior(const ByteRange& range, uint64_t file_bytes) {
  const uint64_t begin = RoundUp(range.begin, kWriterBlock);
  const uint64_t end =
      range.end == file_bytes ? range.end : RoundDown(range.end, kWriterBlock);
  return {begin, std::max(begin, end)};
}

void TakePart(std::vector<OutputSpec>* files, int part, int parts) {
  // A multiple of kWriterBlock, and small beside what a writer gets of any file
  // that is worth dividing.
  constexpr uint64_t kGrain = uint64_t{64} << 10;
  uint64_t total = 0;
  for (OutputSpec& file : *files) {
    if (!file.ranges) {
      file.ranges.emplace();
      if (file.bytes > 0) file.ranges->push_back({0, file.bytes});
    }
    for (const auto& [begin, end] : *file.ranges) {
      total += RoundUp(end - begin, kGrain);
    }
  }
  const std::vector<uint64_t> cuts = BalancedCuts(total, parts, kGrain);
  const uint64_t first = cuts[static_cast<size_t>(part)];
  const uint64_t last = cuts[static_cast<size_t>(part) + 1];
  uint64_t at = 0;  // of the range, counted through all of them
  for (OutputSpec& file : *files) {
    std::vector<ByteRange> own;
    for (const auto& [begin, end] : *file.ranges) {
      const uint64_t next = at + RoundUp(end - begin, kGrain);
      const uint64_t from = begin + std::clamp(first, at, next) - at;
      const uint64_t to =
          std::min(end, begin + std::clamp(last, at, next) - at);
      if (from < to) own.push_back({from, to});
      at = next;
    }
    file.ranges = std::move(own);
  }
}

Status CreateOutputs(const Directory& staging,
                     const std::vector<OutputSpec>& files) {
  for (const OutputSpec& spec : files) {
    TC_RETURN_IF_ERROR(Create(staging, spec));
  }
  return {};
}

Result<std::vector<std::vector<WrittenRange>>> WriteOutputs(
    const Directory& staging, const std::vector<OutputSpec>& files,
    const OutputOptions& options, Job* job, const FillFn& fill,
    const PlaceFn& place) {
  struct Item {
    size_t file;
    uint64_t begin;
    uint64_t bytes;
    uint32_t* digests;  // of the segments from that of `begin` on
  };
  std::vector<Item> items;
  std::vector<Output> outputs(files.size());
  std::vector<std::vector<WrittenRange>> written(files.size());
  for (size_t f = 0; f < files.size(); ++f) {
    const OutputSpec& spec = files[f];
    if (spec.ranges) {
      for (const ByteRange& range : *spec.ranges) {
        TC_RETURN_IF_ERROR(CheckRange(spec, range));
        written[f].push_back({range, {}});
      }
    } else {
      written[f].push_back({{0, spec.bytes}, {}});
      // It is to be there, whether it has a piece or not.
      if (spec.bytes == 0) items.push_back({f, 0, 0, nullptr});
    }
    for (WrittenRange& range : written[f]) {
      range.crc32c.resize(SegmentCount(range.bytes));
      ForEachPiece(range.bytes, [&](uint64_t at, uint64_t until) {
        items.push_back({f, at, until - at,
                         &range.crc32c[at / kSegmentBytes -
                                       range.bytes.begin / kSegmentBytes]});
        job->AddTotal(until - at);
      });
    }
  }
  for (const Item& item : items) ++outputs[item.file].left;
  const auto run = [&]() -> Status {
    for (const OutputSpec& spec : files) {
      if (spec.ranges) continue;
      TC_RETURN_IF_ERROR(Create(staging, spec));
    }
    const int workers = static_cast<int>(std::min<uint64_t>(
        static_cast<uint64_t>(std::max(1, options.workers)), items.size()));
    return ForEachItem(
        workers, static_cast<int64_t>(items.size()), job,
        [&](int64_t i, int worker) -> Status {
          const Item& item = items[static_cast<size_t>(i)];
          const OutputSpec& spec = files[item.file];
          Output* output = &outputs[item.file];
          const uint64_t bytes = item.bytes;
          TC_RETURN_IF_ERROR(
              OpenOnce(staging, spec, options.direct_io, output));
          if (options.before_piece) {
            TC_RETURN_IF_ERROR(options.before_piece(item.file, item.begin));
          }
          std::vector<ByteSpan> placed;
          if (place) placed = place(item.file, item.begin, bytes);
          if (!placed.empty()) {
            TC_RETURN_IF_ERROR(WritePlaced(output->sink.get(), item.begin,
                                           placed, item.digests));
          } else {
            // One lease for both: a worker that held one and waited for the
            // other could wait for ever.
            TC_ASSIGN_OR_RETURN(
                const ArenaLease buffer,
                LeaseBuffer(kPieceBytes + options.scratch_bytes, job));
            // Speed only: a system may forbid or limit locked memory.
            if (options.page_locker) {
              (void)buffer.PageLock(options.page_locker, 0, buffer.size());
            }
            TC_RETURN_IF_ERROR(
                WritePiece(spec, output->sink.get(), item.begin, buffer.span(),
                           bytes, item.file, buffer.span().subspan(kPieceBytes),
                           worker, fill, options.fill_bytes, item.digests));
          }
          job->AddDone(bytes);
          if (--output->left == 0) {
            Status closed = output->sink->Close(options.sync);
            output->sink.reset();
            return closed;
          }
          return {};
        });
  };
  Status status = run();
  if (!status.ok()) {
    for (const OutputSpec& spec : files) {
      // Best effort: the next save wipes the staging directory anyway, and
      // the first error is the one to report.
      if (!spec.ranges) (void)staging.Unlink(spec.staged, true);
    }
    return status;
  }
  return written;
}

}  // namespace torch_ckpt
