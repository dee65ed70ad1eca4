#include "engine_test_util.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

namespace torch_ckpt {

Array MakeArray(Dtype dtype, Dims shape, uint32_t seed) {
  Array array{dtype, shape, {}};
  array.bytes.resize(*ByteSize(dtype, shape));
  std::mt19937 random(seed);
  for (size_t at = 0; at < array.bytes.size(); at += sizeof(uint32_t)) {
    const auto word = static_cast<uint32_t>(random());
    std::memcpy(array.bytes.data() + at, &word,
                std::min(sizeof(word), array.bytes.size() - at));
  }
  return array;
}

std::string RandomBytes(size_t size, uint32_t seed) {
  return MakeArray(Dtype::kU8, {static_cast<int64_t>(size)}, seed).bytes;
}

std::string BoxBytes(const Array& array, const Box& box) {
  if (box == Box::Whole(array.shape)) return array.bytes;
  const Unit unit = DtypeUnit(array.dtype);
  const int rank = box.rank();
  Dims shape = array.shape, offsets = box.offsets, sizes = box.sizes;
  shape[rank - 1] /= unit.elements;
  offsets[rank - 1] /= unit.elements;
  sizes[rank - 1] /= unit.elements;
  std::string out;
  for (int64_t i = 0; i < sizes.Product(); ++i) {
    int64_t rest = i, linear = 0, stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      linear += (offsets[d] + rest % sizes[d]) * stride;
      rest /= sizes[d];
      stride *= shape[d];
    }
    out.append(array.bytes, static_cast<size_t>(linear * unit.bytes),
               static_cast<size_t>(unit.bytes));
  }
  return out;
}

Box RandomBox(const Dims& shape, int64_t last_unit, std::mt19937* random) {
  Box box = Box::Whole(shape);
  for (int d = 0; d < shape.size(); ++d) {
    const int64_t unit = d == shape.size() - 1 ? last_unit : 1;
    const int64_t units = shape[d] / unit;
    std::uniform_int_distribution<int64_t> begin(0, units);
    box.offsets[d] = begin(*random);
    std::uniform_int_distribution<int64_t> size(0, units - box.offsets[d]);
    box.sizes[d] = size(*random) * unit;
    box.offsets[d] *= unit;
  }
  return box;
}

Piece WholePiece(std::string name, const Array& array, int64_t rank) {
  return {rank, std::move(name), &array, Box::Whole(array.shape)};
}

std::vector<Piece> GridPieces(const std::string& name, const Array& array,
                              const Dims& parts) {
  std::vector<Piece> pieces;
  const int64_t unit = DtypeUnit(array.dtype).elements;
  const int last = array.shape.size() - 1;
  for (int64_t i = 0; i < parts.Product(); ++i) {
    Box box = Box::Whole(array.shape);
    int64_t rest = i;
    for (int d = last; d >= 0; --d) {
      const int64_t grain = d == last ? unit : 1;
      const int64_t units = array.shape[d] / grain;
      const int64_t chunk = (units + parts[d] - 1) / parts[d];
      const int64_t begin = std::min(units, rest % parts[d] * chunk);
      box.offsets[d] = begin * grain;
      box.sizes[d] = std::min(chunk, units - begin) * grain;
      rest /= parts[d];
    }
    pieces.push_back({i, name, &array, box});
  }
  return pieces;
}

SourceTensor BytesSource(const std::string& bytes) {
  SourceTensor source;
  source.data = reinterpret_cast<const std::byte*>(bytes.data());
  source.sizes = {static_cast<int64_t>(bytes.size())};
  source.strides = {1};
  return source;
}

void PlanRank(int64_t rank, const std::vector<Piece>& pieces,
              const SaveSettings& settings, RankWork* work) {
  std::map<std::string, size_t> boxes;
  size_t files = 0;
  std::vector<std::pair<const Piece*, size_t>> mine;
  for (const Piece& piece : pieces) {
    if (piece.rank != rank) continue;
    const size_t file = boxes[piece.name]++;
    files = std::max(files, file + 1);
    mine.emplace_back(&piece, file);
    work->memory.push_back(BoxBytes(*piece.array, piece.box));
  }
  if (rank == 0 && !settings.object.empty()) {
    work->memory.push_back(settings.object);
  }
  for (const std::string& bytes : work->memory) {
    work->sources.push_back(BytesSource(bytes));
  }
  work->plan.options = settings.output;
  work->plan.files.resize(files);
  for (size_t f = 0; f < files; ++f) {
    const auto index = static_cast<int64_t>(f + 1);
    const auto count = static_cast<int64_t>(files);
    work->plan.files[f].name =
        settings.below + ShardFileName(rank, index, count);
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    const Piece& piece = *mine[i].first;
    work->plan.files[mine[i].second].tensors.push_back(
        {piece.name, piece.array->dtype, piece.box.sizes, piece.box.offsets,
         piece.array->shape, i});
  }
  if (rank == 0 && !settings.object.empty()) {
    WriteFile objects;
    objects.name = settings.below + ObjectFileName(0);
    objects.role = FileRole::kObjects;
    objects.raw = {work->sources.size() - 1};
    work->plan.files.push_back(std::move(objects));
  }
}

Status WriteRanks(const std::string& staging, const std::vector<Piece>& pieces,
                  const SaveSettings& settings, CommitRequest* request) {
  int64_t ranks = settings.world_size;
  for (const Piece& piece : pieces) ranks = std::max(ranks, piece.rank + 1);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    RankWork work;
    PlanRank(rank, pieces, settings, &work);
    if (work.plan.files.empty()) continue;
    work.plan.staging = staging;
    Job job;
    TC_ASSIGN_OR_RETURN(const WrittenPlan written,
                        RunWriteJob(work.plan, work.sources, &job));
    for (const StagedFile& file : written.files) {
      request->files.push_back(file);
    }
  }
  request->world_size = ranks;
  if (settings.index) request->index_name = kIndexName;
  if (!settings.object.empty()) {
    request->objects.push_back({"step", settings.below + ObjectFileName(0)});
  }
  return {};
}

Result<Manifest> SaveAll(const std::string& target,
                         const std::vector<Piece>& pieces,
                         const SaveSettings& settings) {
  TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(target, true));
  CommitRequest request;
  TC_RETURN_IF_ERROR(
      WriteRanks(session.place().path, pieces, settings, &request));
  return CommitSave(&session, request);
}

Result<std::string> ReadBox(const CheckpointPtr& checkpoint,
                            const std::string& name, const Box& box,
                            bool verify, int workers) {
  const int64_t id = checkpoint->catalog().Find(name);
  if (id < 0) return Incomplete("no such tensor");
  const CatalogEntry& entry =
      checkpoint->catalog().entries()[static_cast<size_t>(id)];
  TC_ASSIGN_OR_RETURN(const uint64_t bytes, ByteSize(entry.dtype, box.sizes));
  std::string out(bytes, '\x5a');
  TargetTensor target;
  target.data = reinterpret_cast<std::byte*>(out.data());
  target.sizes = {static_cast<int64_t>(bytes)};
  target.strides = {1};
  ReadPlan plan;
  plan.items.push_back({name, box, {}, 0});
  plan.verify = verify;
  plan.workers = workers;
  Job job;
  TC_RETURN_IF_ERROR(RunReadJob(checkpoint, plan, {target}, &job).status());
  return out;
}

Result<std::map<std::string, std::string>> ReadAll(const std::string& path,
                                                   bool verify) {
  TC_ASSIGN_OR_RETURN(const CheckpointPtr checkpoint, OpenCheckpoint(path));
  std::map<std::string, std::string> out;
  for (const CatalogEntry& entry : checkpoint->catalog().entries()) {
    const std::string name(entry.name);
    if (entry.kind == EntryKind::kObject) {
      TC_ASSIGN_OR_RETURN(out[name],
                          checkpoint->file_set()->ReadWhole(entry.file));
      continue;
    }
    TC_ASSIGN_OR_RETURN(
        out[name], ReadBox(checkpoint, name, Box::Whole(entry.shape), verify));
  }
  return out;
}

Result<Manifest> Merge(const std::string& from, const std::string& to,
                       const MergeSettings& settings) {
  TC_ASSIGN_OR_RETURN(const CheckpointPtr checkpoint, OpenCheckpoint(from));
  MergeOptions options;
  if (!settings.mapping.empty()) options.files.mapping = settings.mapping;
  options.strict = settings.strict;
  options.verify = settings.verify;
  options.output = settings.output;
  TC_ASSIGN_OR_RETURN(const MergePlan plan,
                      MergePlan::Make(checkpoint, options, {}));
  TC_ASSIGN_OR_RETURN(BegunMerge merge,
                      BeginMerge(plan, {.path = to, .overwrite = true}));
  const Directory& staging = merge.session->directory();
  std::vector<std::vector<WrittenRange>> written;
  if (settings.ranks == 0) {
    Job job;
    TC_ASSIGN_OR_RETURN(written,
                        RunMergeJob(plan, staging, plan.outputs(), &job));
  } else {
    std::vector<std::string> ids;
    for (const Output& output : plan.outputs()) {
      TC_RETURN_IF_ERROR(CreateOutput(staging, output.file));
      ids.push_back(output.file.id);
    }
    written.resize(plan.outputs().size());
    for (int rank = 0; rank < settings.ranks; ++rank) {
      // Every rank makes the plan for itself.
      TC_ASSIGN_OR_RETURN(const MergePlan own,
                          MergePlan::Make(checkpoint, options, ids));
      std::vector<Output> outputs = own.outputs();
      TakeShare(&outputs, rank, settings.ranks);
      Job job;
      TC_ASSIGN_OR_RETURN(const auto part,
                          RunMergeJob(own, staging, outputs, &job));
      for (size_t f = 0; f < part.size(); ++f) {
        written[f].insert(written[f].end(), part[f].begin(), part[f].end());
      }
    }
  }
  return CommitMerge(plan, &merge, {}, std::move(written));
}

void WriteForeign(const std::string& path,
                  const std::vector<ForeignTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  std::string info, data;
  for (const ForeignTensor& t : tensors) {
    entries.push_back(
        {t.name, t.dtype, t.shape, data.size(), data.size() + t.bytes.size()});
    data += t.bytes;
    if (!t.offsets) continue;
    info +=
        (info.empty() ? "{\"" : ", \"") + t.name + "\": {\"saved_offsets\": ";
    std::string list = t.offsets->ToString();
    list.front() = '[';
    list.back() = ']';
    info += list + "}";
  }
  std::vector<std::pair<std::string, std::string>> metadata = {
      {"format", "pt"}};
  if (!info.empty()) {
    metadata.emplace_back("DCP_VERSION", "1.0");
    metadata.emplace_back("DCP_SHARDING_INFO", info + "}");
  }
  auto header = BuildSafetensorsHeader(metadata, entries);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  std::ofstream out(path, std::ios::binary);
  out << *header << data;
}

ForeignTensor ForeignBox(const std::string& name, const Array& array,
                         const Box& box) {
  return {name, array.dtype, box.sizes, BoxBytes(array, box), box.offsets};
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;  // at once: sanitized, one character takes long
  text << in.rdbuf();
  return std::move(text).str();
}

std::vector<std::string> Names(const std::string& path) {
  auto directory = Directory::Open(path);
  return directory.ok() ? *directory->List() : std::vector<std::string>();
}

}  // namespace torch_ckpt
