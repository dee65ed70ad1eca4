#include "engine/save/assemble_job.h"

#include <algorithm>
#include <map>

#include "base/checked.h"
#include "engine/open/build_catalog.h"
#include "engine/write/stored_providers.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMinWorkerBytes = uint64_t{1} << 20;

// A final file while it is put together.
struct Assembly {
  FileHeader header;
  std::vector<WrittenRange> ranges;  // the header's and those of the ranks
};

Result<WrittenRange> HeaderRange(const Directory& staging,
                                 const std::string& staged, uint64_t bytes) {
  TC_ASSIGN_OR_RETURN(const File in, staging.OpenFile(staged, {}));
  std::string text(bytes, '\0');
  TC_RETURN_IF_ERROR(in.ReadExact(
      {reinterpret_cast<std::byte*>(text.data()), text.size()}, 0));
  WrittenRange range{{0, bytes}, {}};
  range.crc32c.resize(SegmentCount(range.bytes));
  SegmentDigester digester(range.crc32c.data(), 0);
  digester.Add(AsBytes(text));
  return range;
}

// The tensor that byte `at` of a file belongs to, for messages.
std::string TensorAt(const Assembly& file, uint64_t at) {
  for (const SafetensorsEntry& entry : file.header.header.tensors) {
    const uint64_t begin = file.header.header.data_begin;
    if (at >= begin + entry.begin && at < begin + entry.end) return entry.name;
  }
  return {};
}

Status CheckIds(const FinalFiles& list, const RankFinals& rank) {
  for (const WrittenFinal& file : rank.files) {
    if (file.file >= list.files.size()) {
      return InvalidArgument("rank " + std::to_string(rank.rank) +
                             " has written a final file that there is not");
    }
    const StagedFile& named = list.files[file.file];
    if (file.id == named.id) continue;
    return Conflict("rank " + std::to_string(rank.rank) +
                    " has written by the header " + file.id +
                    ", the coordinator has staged " + named.id)
        .WithFile(named.name);
  }
  return {};
}

std::shared_ptr<const FileSet> SpillsOf(const std::vector<RankFinals>& ranks,
                                        Directory staging) {
  FileList list{std::make_shared<const Directory>(std::move(staging)), {}};
  for (const RankFinals& rank : ranks) {
    for (const WrittenSpill& spill : rank.spills) {
      ManifestFile file = spill.file;
      file.name = spill.file.staged;
      file.role = FileRole::kData;
      file.container = Container::kRaw;
      list.files.push_back(std::move(file));
    }
  }
  return std::make_shared<const FileSet>(std::move(list));
}

// What ranks have left of the final files, as extents of these.
class Spills {
 public:
  // `ranks` must outlive this.
  Spills(const std::vector<RankFinals>& ranks, Directory staging,
         const OutputOptions& options)
      : files_(SpillsOf(ranks, std::move(staging))),
        inputs_(std::make_shared<OpenFiles>(files_, options.direct_io),
                /*verify=*/true, options.workers),
        stretches_(&inputs_),
        bands_(&inputs_, [this](uint32_t band) -> Result<StoredViewPtr> {
          return gathered_[band];
        }) {
    uint32_t file = 0;
    for (const RankFinals& rank : ranks) {
      for (const WrittenSpill& spill : rank.spills) {
        for (const SpillBytes& bytes : spill.bytes) {
          left_[bytes.file].push_back({bytes.bytes.begin,
                                       bytes.bytes.end,
                                       {&stretches_, file},
                                       bytes.at});
        }
        for (const SpillBox& box : spill.boxes) {
          boxes_[box.tensor].push_back({file, &box});
        }
        ++file;
      }
    }
  }

  // Of final file `file`, ascending. Proves that the boxes of each band tile
  // it.
  Result<std::vector<Extent>> LeftOf(const FinalFiles& list, uint32_t file,
                                     const FileHeader& header) {
    std::vector<Extent> left = std::move(left_[file]);
    const std::vector<SafetensorsEntry>& entries = header.header.tensors;
    for (uint32_t e = 0; e < entries.size(); ++e) {
      const auto boxes = boxes_.find(entries[e].name);
      if (boxes == boxes_.end()) continue;
      TC_RETURN_IF_ERROR(AddBands(list, {file, e}, entries[e], boxes->second,
                                  header.header.data_begin, &left)
                             .WithTensor(entries[e].name));
    }
    std::sort(left.begin(), left.end(), [](const Extent& a, const Extent& b) {
      return a.begin < b.begin;
    });
    return left;
  }

  // When all is read: whether it was what the ranks have written.
  Status Check(Job* job) { return inputs_.Check(job); }

 private:
  struct LeftBox {
    uint32_t file;  // the spill
    const SpillBox* box;
  };

  // The bands of a tensor that there are boxes of.
  Status AddBands(const FinalFiles& list, FinalPlace place,
                  const SafetensorsEntry& whole,
                  const std::vector<LeftBox>& boxes, uint64_t data,
                  std::vector<Extent>* left) {
    std::map<const FinalBand*, std::vector<LeftBox>> by_band;
    for (const LeftBox& each : boxes) {
      TC_ASSIGN_OR_RETURN(const FinalBand* const band,
                          list.BandOf(place, each.box->box));
      if (!band) {
        return Conflict(
            "a rank has left a box to be gathered, and it is "
            "planned to write that");
      }
      by_band[band].push_back(each);
    }
    for (const auto& [band, of_band] : by_band) {
      TC_ASSIGN_OR_RETURN(SafetensorsEntry rows, EntryOf(whole, *band));
      if (!(rows.shape == whole.shape)) {  // another band may come
        rows.name += " rows " + std::to_string(band->begin) + " to " +
                     std::to_string(band->end);
      }
      Result<StoredViewPtr> gathered = Gather(*band, of_band, rows);
      if (!gathered.ok()) {
        return Status(gathered.status()).WithTensor(std::move(rows.name));
      }
      if (rows.begin == rows.end) continue;
      left->push_back(
          {data + rows.begin, data + rows.end, {&bands_, gathered_.size()}, 0});
      gathered_.push_back(std::move(gathered).value());
    }
    return {};
  }

  // Rows of a tensor that ranks have left box by box.
  Result<StoredViewPtr> Gather(const FinalBand& band,
                               const std::vector<LeftBox>& boxes,
                               const SafetensorsEntry& rows) {
    std::vector<Placement> placements;
    for (const auto& [file, box] : boxes) {
      Placement placement;
      placement.file = file;
      placement.offset = box->at;
      placement.box = InBand(box->box, band);
      if (!Inside(placement.box, rows.shape)) {
        return Corrupt("box " + placement.box.ToString() +
                       " is not inside shape " + rows.shape.ToString())
            .WithFile(files_->files()[file].name);
      }
      TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                          ByteSize(rows.dtype, placement.box.sizes));
      const auto end = CheckedAdd(box->at, bytes);
      if (!end || *end > files_->files()[file].bytes) {
        return Corrupt("a rank has left a box behind the end of its file")
            .WithFile(files_->files()[file].name);
      }
      placements.push_back(std::move(placement));
    }
    TC_RETURN_IF_ERROR(ProveOwners(rows.shape, placements));
    CatalogEntry entry;
    entry.dtype = rows.dtype;
    entry.shape = rows.shape;
    return StoredView::Make(entry, placements);
  }

  const std::shared_ptr<const FileSet> files_;
  StoredInputs inputs_;
  StoredFiles stretches_;
  StoredTensors bands_;
  std::map<uint32_t, std::vector<Extent>> left_;  // by final file, no bands
  std::map<std::string_view, std::vector<LeftBox>> boxes_;  // by tensor
  std::vector<StoredViewPtr> gathered_;
};

// Ok where what is left are the holes.
Status CheckCovered(const Assembly& file, const std::vector<ByteRange>& holes,
                    const std::vector<Extent>& extents,
                    const std::string& name) {
  const auto wrong = [&](Status status, uint64_t at) {
    std::string tensor = TensorAt(file, at);
    return tensor.empty()
               ? std::move(status).WithFile(name)
               : std::move(status).WithFile(name).WithTensor(std::move(tensor));
  };
  auto left = extents.begin();
  for (const ByteRange& hole : holes) {
    uint64_t at = hole.begin;
    while (at < hole.end) {
      if (left == extents.end() || left->begin > at) {
        const uint64_t end =
            left == extents.end() ? hole.end : std::min(hole.end, left->begin);
        return wrong(
            Incomplete("bytes " + std::to_string(at) + " to " +
                       std::to_string(end) + " were written by no rank"),
            at);
      }
      if (left->begin < at || left->end > hole.end) break;
      at = left->end;
      ++left;
    }
    if (at < hole.end) break;
  }
  if (left == extents.end()) return {};
  return wrong(
      Conflict("bytes " + std::to_string(left->begin) + " to " +
               std::to_string(left->end) + " were written by two ranks"),
      left->begin);
}

// One call of RunAssembleJob.
class AssembleJob {
 public:
  AssembleJob(const Directory& staging, const FinalFiles& list)
      : staging_(staging), list_(list), files_(list.files.size()) {}

  // The files as they were laid out.
  Status ReadHeaders() {
    for (size_t f = 0; f < files_.size(); ++f) {
      const StagedFile& named = list_.files[f];
      Assembly& file = files_[f];
      TC_ASSIGN_OR_RETURN(file.header,
                          ReadStagedHeader(staging_, named.staged));
      if (file.header.sharding.file_id != named.id) {
        return Conflict("is not the file that was laid out")
            .WithFile(staging_.Join(named.staged));
      }
      TC_ASSIGN_OR_RETURN(
          WrittenRange header,
          HeaderRange(staging_, named.staged, file.header.header.data_begin));
      file.ranges.push_back(std::move(header));
      outputs_.push_back({named, {}});
      outputs_.back().file.bytes = file.header.header.file_bytes;
    }
    return {};
  }

  // What the ranks have written; the rest are holes.
  Status TakeReports(const std::vector<RankFinals>& ranks) {
    for (const RankFinals& rank : ranks) {
      TC_RETURN_IF_ERROR(CheckIds(list_, rank));
      for (const WrittenFinal& written : rank.files) {
        std::vector<WrittenRange>& all = files_[written.file].ranges;
        all.insert(all.end(), written.ranges.begin(), written.ranges.end());
      }
    }
    for (size_t f = 0; f < files_.size(); ++f) {
      Output& output = outputs_[f];
      auto holes = Holes(files_[f].ranges, output.file.bytes);
      if (!holes.ok()) return holes.status().WithFile(output.file.name);
      for (const ByteRange& hole : *holes) left_ += hole.end - hole.begin;
      output.ranges = std::move(holes).value();
    }
    return {};
  }

  // Fills the holes with what the ranks have left.
  Status Write(const std::vector<RankFinals>& ranks, OutputOptions options,
               Job* job) {
    // Often it is little, and memory that a worker needs takes longer to get.
    options.workers = static_cast<int>(std::clamp<uint64_t>(
        left_ / kMinWorkerBytes, 1,
        static_cast<uint64_t>(std::max(1, options.workers))));
    TC_ASSIGN_OR_RETURN(Directory staging, Directory::Open(staging_.path()));
    Spills spills(ranks, std::move(staging), options);
    for (size_t f = 0; f < files_.size(); ++f) {
      Output& output = outputs_[f];
      TC_ASSIGN_OR_RETURN(
          const std::vector<Extent> left,
          spills.LeftOf(list_, static_cast<uint32_t>(f), files_[f].header));
      TC_RETURN_IF_ERROR(
          CheckCovered(files_[f], *output.ranges, left, output.file.name));
      for (const Extent& e : left) {
        output.extents.Place(e.begin, e.end - e.begin, e.origin, e.from);
      }
    }
    TC_ASSIGN_OR_RETURN(written_,
                        WriteOutputs(staging_, outputs_, options, job));
    return spills.Check(job);
  }

  Result<std::vector<StagedFile>> Finish() {
    std::vector<StagedFile> done;
    for (size_t f = 0; f < files_.size(); ++f) {
      StagedFile file = outputs_[f].file;
      std::vector<WrittenRange>& all = files_[f].ranges;
      all.insert(all.end(), written_[f].begin(), written_[f].end());
      auto digests = CombineRanges(std::move(all), file.bytes);
      if (!digests.ok()) return digests.status().WithFile(file.name);
      file.crc32c = std::move(digests).value();
      done.push_back(std::move(file));
    }
    return done;
  }

 private:
  const Directory& staging_;
  const FinalFiles& list_;
  std::vector<Assembly> files_;
  std::vector<Output> outputs_;
  uint64_t left_ = 0;  // bytes
  std::vector<std::vector<WrittenRange>> written_;
};

}  // namespace

Result<std::vector<StagedFile>> RunAssembleJob(
    const Directory& staging, const FinalFiles& list,
    const std::vector<RankFinals>& ranks, const OutputOptions& options,
    Job* job) {
  AssembleJob assemble(staging, list);
  TC_RETURN_IF_ERROR(assemble.ReadHeaders());
  TC_RETURN_IF_ERROR(assemble.TakeReports(ranks));
  TC_RETURN_IF_ERROR(assemble.Write(ranks, options, job));
  return assemble.Finish();
}

}  // namespace torch_ckpt
