#include "engine/final/assemble_job.h"

#include <algorithm>
#include <map>

#include "engine/open/build_catalog.h"
#include "engine/write/stored_providers.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMinWorkerBytes = uint64_t{1} << 20;

// Bytes [begin, end) of a final file that ranks have left: those of a band, or
// of a file of parts from `from` on.
struct Left {
  uint64_t begin = 0, end = 0;
  bool is_band = false;
  uint32_t index = 0;  // of the band in the catalog, or of the file
  uint64_t from = 0;
};

// A final file while it is put together.
struct Assembly {
  FileHeader header;
  std::vector<WrittenRange> ranges;  // the header's and those of the ranks
  std::vector<ByteRange> holes;
  std::vector<Left> left;  // ascending
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
    const FinalFile& named = list.files[file.file];
    if (file.id == named.id) continue;
    return Conflict("rank " + std::to_string(rank.rank) +
                    " has written by the header " + file.id +
                    ", the coordinator has staged " + named.id)
        .WithFile(named.name);
  }
  return {};
}

// The parts of all ranks, as a checkpoint that can be read.
class Parts {
 public:
  explicit Parts(const std::vector<RankFinals>& ranks) {
    for (const RankFinals& rank : ranks) {
      for (const WrittenParts& parts : rank.parts) {
        const OutputSpec& spec = parts.file.spec;
        const auto file = static_cast<uint32_t>(manifest_.files.size());
        // Without a header.
        manifest_.files.push_back({spec.staged, spec.id, FileRole::kData,
                                   spec.bytes, parts.file.crc32c,
                                   Container::kRaw});
        for (const PartBytes& bytes : parts.bytes)
          bytes_.push_back({file, bytes});
        for (const PartBox& box : parts.boxes) {
          boxes_[box.tensor].push_back({file, &box});
        }
      }
    }
  }

  // What the parts hold of final file `file`. Adds the bands of which there are
  // boxes to the catalog, as tensors.
  Result<std::vector<Left>> LeftOf(const FinalFiles& list, uint32_t file,
                                   const FileHeader& header) {
    std::vector<Left> left;
    for (const auto& [from, bytes] : bytes_) {
      if (bytes.file != file) continue;
      left.push_back(
          {bytes.bytes.begin, bytes.bytes.end, false, from, bytes.at});
    }
    const std::vector<SafetensorsEntry>& entries = header.header.tensors;
    for (uint32_t e = 0; e < entries.size(); ++e) {
      const auto boxes = boxes_.find(entries[e].name);
      if (boxes == boxes_.end()) continue;
      TC_RETURN_IF_ERROR(AddBands(list, {file, e}, entries[e], boxes->second,
                                  header.header.data_begin, &left)
                             .WithTensor(entries[e].name));
    }
    std::sort(left.begin(), left.end(),
              [](const Left& a, const Left& b) { return a.begin < b.begin; });
    return left;
  }

  // What is left of `files` knows bands by their number till here.
  Result<std::shared_ptr<const Checkpoint>> Open(
      const Directory& staging, std::vector<Assembly>* files) && {
    std::vector<uint32_t> positions;
    TC_ASSIGN_OR_RETURN(std::string encoded, catalog_.Encode(&positions));
    for (Assembly& file : *files) {
      for (Left& left : file.left) {
        if (left.is_band) left.index = positions[left.index];
      }
    }
    TC_ASSIGN_OR_RETURN(Catalog catalog,
                        Catalog::Parse(std::move(encoded), manifest_.files));
    // Before anything is written: boxes that do not tile their band.
    for (uint32_t e = 0; e < catalog_.size(); ++e) {
      const CatalogBuilder::Entry& band = catalog_.entry(e);
      TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                          catalog_.Placements(e));
      TC_RETURN_IF_ERROR(
          ProveOwners(band.shape, placements).WithTensor(band.name));
    }
    return Checkpoint::OfStaged(staging, std::move(manifest_),
                                std::move(catalog));
  }

 private:
  struct FromBytes {
    uint32_t file;
    PartBytes bytes;
  };
  struct FromBox {
    uint32_t file;
    const PartBox* box;
  };

  // The bands of a tensor that there are boxes of.
  Status AddBands(const FinalFiles& list, FinalPlace place,
                  const SafetensorsEntry& whole,
                  const std::vector<FromBox>& boxes, uint64_t data,
                  std::vector<Left>* left) {
    std::map<const FinalBand*, std::vector<FromBox>> by_band;
    for (const FromBox& each : boxes) {
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
      TC_RETURN_IF_ERROR(AddBand(whole, *band, of_band, data, left));
    }
    return {};
  }

  Status AddBand(const SafetensorsEntry& whole, const FinalBand& band,
                 const std::vector<FromBox>& boxes, uint64_t data,
                 std::vector<Left>* left) {
    TC_ASSIGN_OR_RETURN(const SafetensorsEntry entry, EntryOf(whole, band));
    std::string name = whole.name;
    if (!(entry.shape == whole.shape)) {  // another band may come
      name += " rows " + std::to_string(band.begin) + " to " +
              std::to_string(band.end);
    }
    TC_ASSIGN_OR_RETURN(
        const uint32_t id,
        catalog_.AddTensor(std::move(name), entry.dtype, entry.shape));
    for (const auto& [from, box] : boxes) {
      Placement placement;
      placement.file = from;
      placement.offset = box->at;
      placement.box = InBand(box->box, band);
      TC_RETURN_IF_ERROR(catalog_.AddPlacement(id, placement));
    }
    if (entry.begin == entry.end) return {};
    left->push_back({data + entry.begin, data + entry.end, true, id, 0});
    return {};
  }

  Manifest manifest_;
  CatalogBuilder catalog_;
  std::vector<FromBytes> bytes_;
  std::map<std::string_view, std::vector<FromBox>> boxes_;
};

// Ok where what is left are the holes.
Status CheckCovered(const Assembly& file, const std::string& name) {
  const auto wrong = [&](Status status, uint64_t at) {
    std::string tensor = TensorAt(file, at);
    return tensor.empty()
               ? std::move(status).WithFile(name)
               : std::move(status).WithFile(name).WithTensor(std::move(tensor));
  };
  auto left = file.left.begin();
  for (const ByteRange& hole : file.holes) {
    uint64_t at = hole.begin;
    while (at < hole.end) {
      if (left == file.left.end() || left->begin > at) {
        const uint64_t end = left == file.left.end()
                                 ? hole.end
                                 : std::min(hole.end, left->begin);
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
  if (left == file.left.end()) return {};
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
      const FinalFile& named = list_.files[f];
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
      outputs_.push_back({{named.name,
                           named.staged,
                           named.id,
                           FileRole::kData,
                           file.header.header.file_bytes,
                           {}},
                          {}});
    }
    return {};
  }

  // What the ranks have written, and what they have left for the holes.
  Status TakeReports(const std::vector<RankFinals>& ranks) {
    for (const RankFinals& rank : ranks) {
      TC_RETURN_IF_ERROR(CheckIds(list_, rank));
      for (const WrittenFinal& written : rank.files) {
        std::vector<WrittenRange>& all = files_[written.file].ranges;
        all.insert(all.end(), written.ranges.begin(), written.ranges.end());
      }
    }
    Parts parts(ranks);
    for (size_t f = 0; f < files_.size(); ++f) {
      Assembly& file = files_[f];
      OutputSpec& spec = outputs_[f].spec;
      auto holes = Holes(file.ranges, spec.bytes);
      if (!holes.ok()) return holes.status().WithFile(spec.name);
      file.holes = std::move(holes).value();
      TC_ASSIGN_OR_RETURN(
          file.left,
          parts.LeftOf(list_, static_cast<uint32_t>(f), file.header));
      TC_RETURN_IF_ERROR(CheckCovered(file, spec.name));
      for (const ByteRange& hole : file.holes) left_ += hole.end - hole.begin;
      spec.ranges = file.holes;
    }
    TC_ASSIGN_OR_RETURN(checkpoint_, std::move(parts).Open(staging_, &files_));
    return {};
  }

  Status Write(OutputOptions options, Job* job) {
    // Often it is little, and memory that a worker needs takes longer to get.
    options.workers = static_cast<int>(std::clamp<uint64_t>(
        left_ / kMinWorkerBytes, 1,
        static_cast<uint64_t>(std::max(1, options.workers))));
    StoredInputs inputs(checkpoint_, options.direct_io, options.workers);
    StoredTensors bands(&inputs);
    StoredFiles parts(&inputs);
    for (size_t f = 0; f < files_.size(); ++f) {
      for (const Left& left : files_[f].left) {
        Origin origin{&parts, left.index};
        if (left.is_band) origin.provider = &bands;
        outputs_[f].extents.Place(left.begin, left.end - left.begin, origin,
                                  left.from);
      }
    }
    TC_ASSIGN_OR_RETURN(written_,
                        WriteOutputs(staging_, outputs_, options, job));
    return inputs.Check(/*verify=*/true, job);
  }

  Result<std::vector<CommitFile>> Finish() {
    std::vector<CommitFile> done;
    for (size_t f = 0; f < files_.size(); ++f) {
      const OutputSpec& spec = outputs_[f].spec;
      std::vector<WrittenRange>& all = files_[f].ranges;
      all.insert(all.end(), written_[f].begin(), written_[f].end());
      auto digests = CombineRanges(std::move(all), spec.bytes);
      if (!digests.ok()) return digests.status().WithFile(spec.name);
      done.push_back({spec.staged,
                      {spec.name, spec.id, FileRole::kData, spec.bytes,
                       std::move(digests).value()}});
    }
    return done;
  }

 private:
  const Directory& staging_;
  const FinalFiles& list_;
  std::vector<Assembly> files_;
  std::vector<Output> outputs_;
  uint64_t left_ = 0;  // bytes
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<std::vector<WrittenRange>> written_;
};

}  // namespace

Result<std::vector<CommitFile>> RunAssembleJob(
    const Directory& staging, const FinalFiles& list,
    const std::vector<RankFinals>& ranks, const OutputOptions& options,
    Job* job) {
  AssembleJob assemble(staging, list);
  TC_RETURN_IF_ERROR(assemble.ReadHeaders());
  TC_RETURN_IF_ERROR(assemble.TakeReports(ranks));
  TC_RETURN_IF_ERROR(assemble.Write(options, job));
  return assemble.Finish();
}

}  // namespace torch_ckpt
