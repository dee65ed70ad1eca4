#include "engine/assemble_job.h"

#include <algorithm>
#include <map>

#include "engine/build_catalog.h"
#include "engine/merge_job.h"

namespace torch_ckpt {
namespace {

using Extent = MergePlan::Extent;

constexpr uint64_t kMinWorkerBytes = uint64_t{1} << 20;

// A final file while it is put together.
struct Assembly {
  FileHeader header;
  std::vector<WrittenRange> ranges;  // the header's and those of the ranks
  std::vector<ByteRange> holes;
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

// The parts of all ranks as a checkpoint that the merge reads from.
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

  // The extents of final file `file` that the parts hold. Adds the bands of
  // which there are boxes to the catalog, as tensors.
  Result<std::vector<Extent>> ExtentsOf(const FinalFiles& list, uint32_t file,
                                        const FileHeader& header) {
    std::vector<Extent> extents;
    for (const auto& [from, bytes] : bytes_) {
      if (bytes.file != file) continue;
      extents.push_back({bytes.bytes.begin,
                         bytes.bytes.end,
                         Extent::kFile,
                         from,
                         bytes.at,
                         {}});
    }
    const std::vector<SafetensorsEntry>& entries = header.header.tensors;
    for (uint32_t e = 0; e < entries.size(); ++e) {
      const SafetensorsEntry& entry = entries[e];
      const auto boxes = boxes_.find(entry.name);
      if (boxes == boxes_.end()) continue;
      std::map<const FinalBand*, std::vector<FromBox>> by_band;
      for (const FromBox& each : boxes->second) {
        const auto of_box = list.BandOf({file, e}, each.box->box);
        if (!of_box.ok()) return of_box.status().WithTensor(entry.name);
        const FinalBand* const band = *of_box;
        if (!band) {
          return Conflict(
                     "a rank has left a box to be gathered, and it is "
                     "planned to write that")
              .WithTensor(entry.name);
        }
        by_band[band].push_back(each);
      }
      for (const auto& [band, of_band] : by_band) {
        TC_RETURN_IF_ERROR(
            AddBand(entry, *band, of_band, header.header.data_begin, &extents)
                .WithTensor(entry.name));
      }
    }
    std::sort(
        extents.begin(), extents.end(),
        [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    return extents;
  }

  // `layouts` are of the extents, which know bands by their number till here.
  Result<std::shared_ptr<const Checkpoint>> Open(
      const Directory& staging, std::vector<MergePlan::Layout>* layouts) && {
    std::vector<uint32_t> positions;
    TC_ASSIGN_OR_RETURN(std::string encoded, catalog_.Encode(&positions));
    for (MergePlan::Layout& layout : *layouts) {
      for (Extent& extent : layout.extents) {
        if (extent.kind == Extent::kTensor)
          extent.index = positions[extent.index];
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

  Status AddBand(const SafetensorsEntry& whole, const FinalBand& band,
                 const std::vector<FromBox>& boxes, uint64_t data,
                 std::vector<Extent>* extents) {
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
    extents->push_back(
        {data + entry.begin, data + entry.end, Extent::kTensor, id, 0, {}});
    return {};
  }

  Manifest manifest_;
  CatalogBuilder catalog_;
  std::vector<FromBytes> bytes_;
  std::map<std::string_view, std::vector<FromBox>> boxes_;
};

// Ok where the extents are the holes.
Status CheckCovered(const Assembly& file, const std::vector<Extent>& extents,
                    const std::string& name) {
  const auto wrong = [&](Status status, uint64_t at) {
    std::string tensor = TensorAt(file, at);
    return tensor.empty()
               ? std::move(status).WithFile(name)
               : std::move(status).WithFile(name).WithTensor(std::move(tensor));
  };
  auto extent = extents.begin();
  for (const ByteRange& hole : file.holes) {
    uint64_t at = hole.begin;
    while (at < hole.end) {
      if (extent == extents.end() || extent->begin > at) {
        const uint64_t end = extent == extents.end()
                                 ? hole.end
                                 : std::min(hole.end, extent->begin);
        return wrong(
            Incomplete("bytes " + std::to_string(at) + " to " +
                       std::to_string(end) + " were written by no rank"),
            at);
      }
      if (extent->begin < at || extent->end > hole.end) break;
      at = extent->end;
      ++extent;
    }
    if (at < hole.end) break;
  }
  if (extent == extents.end()) return {};
  return wrong(
      Conflict("bytes " + std::to_string(extent->begin) + " to " +
               std::to_string(extent->end) + " were written by two ranks"),
      extent->begin);
}

}  // namespace

Result<std::vector<CommitFile>> RunAssembleJob(
    const Directory& staging, const FinalFiles& list,
    const std::vector<RankFinals>& ranks, const OutputOptions& options,
    Job* job) {
  std::vector<Assembly> files(list.files.size());
  std::vector<OutputSpec> outputs;
  for (size_t f = 0; f < files.size(); ++f) {
    const FinalFile& named = list.files[f];
    Assembly& file = files[f];
    TC_ASSIGN_OR_RETURN(file.header, ReadStagedHeader(staging, named.staged));
    if (file.header.sharding.file_id != named.id) {
      return Conflict("is not the file that was laid out")
          .WithFile(staging.Join(named.staged));
    }
    TC_ASSIGN_OR_RETURN(
        WrittenRange header,
        HeaderRange(staging, named.staged, file.header.header.data_begin));
    file.ranges.push_back(std::move(header));
    outputs.push_back({named.name,
                       named.staged,
                       named.id,
                       FileRole::kData,
                       file.header.header.file_bytes,
                       {}});
  }
  for (const RankFinals& rank : ranks) {
    TC_RETURN_IF_ERROR(CheckIds(list, rank));
    for (const WrittenFinal& written : rank.files) {
      std::vector<WrittenRange>& all = files[written.file].ranges;
      all.insert(all.end(), written.ranges.begin(), written.ranges.end());
    }
  }
  Parts parts(ranks);
  std::vector<MergePlan::Layout> layouts;
  uint64_t left = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    Result<std::vector<ByteRange>> holes =
        Holes(files[f].ranges, outputs[f].bytes);
    if (!holes.ok()) return holes.status().WithFile(outputs[f].name);
    files[f].holes = std::move(holes).value();
    TC_ASSIGN_OR_RETURN(
        std::vector<Extent> extents,
        parts.ExtentsOf(list, static_cast<uint32_t>(f), files[f].header));
    TC_RETURN_IF_ERROR(CheckCovered(files[f], extents, outputs[f].name));
    layouts.push_back({{}, std::move(extents)});
    for (const ByteRange& hole : files[f].holes) left += hole.end - hole.begin;
    outputs[f].ranges = files[f].holes;
  }
  TC_ASSIGN_OR_RETURN(auto checkpoint,
                      std::move(parts).Open(staging, &layouts));
  MergeOptions merge;
  merge.output = options;
  // Often it is little, and memory that a worker needs takes longer to get.
  merge.output.workers = static_cast<int>(std::clamp<uint64_t>(
      left / kMinWorkerBytes, 1,
      static_cast<uint64_t>(std::max(1, options.workers))));
  const MergePlan plan = MergePlan::OfExtents(
      std::move(checkpoint), std::move(merge), outputs, std::move(layouts));
  TC_ASSIGN_OR_RETURN(const auto written,
                      RunMergeJob(plan, staging, plan.outputs(), job));
  std::vector<CommitFile> done;
  for (size_t f = 0; f < files.size(); ++f) {
    std::vector<WrittenRange>& all = files[f].ranges;
    all.insert(all.end(), written[f].begin(), written[f].end());
    Result<std::vector<uint32_t>> digests =
        CombineRanges(std::move(all), outputs[f].bytes);
    if (!digests.ok()) return digests.status().WithFile(outputs[f].name);
    done.push_back({outputs[f].staged,
                    {outputs[f].name, outputs[f].id, FileRole::kData,
                     outputs[f].bytes, std::move(digests).value()}});
  }
  return done;
}

}  // namespace torch_ckpt
