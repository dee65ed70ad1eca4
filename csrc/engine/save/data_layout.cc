#include "engine/save/data_layout.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "plan/cover.h"
#include "plan/join.h"
#include "plan/layout.h"

namespace torch_ckpt {
namespace {

Status CheckBytes(const WriteTensor& tensor, const SourceTensor& source) {
  TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                      ByteSize(tensor.dtype, tensor.shape));
  if (bytes != source.bytes()) {
    return InvalidArgument("has " + std::to_string(source.bytes()) +
                           " bytes in memory, a " + DtypeName(tensor.dtype) +
                           " box of " + tensor.shape.ToString() + " takes " +
                           std::to_string(bytes));
  }
  if (!Inside({tensor.offsets, tensor.shape}, tensor.global_shape)) {
    return InvalidArgument(
        "box " + Box{tensor.offsets, tensor.shape}.ToString() +
        " is not inside the global shape " + tensor.global_shape.ToString());
  }
  return {};
}

// The positions of a file's tensors, by name.
struct Names {
  std::vector<uint32_t> first;  // of each name
  // Of those names that have several, by the first: all.
  std::map<uint32_t, std::vector<uint32_t>> several;
};

Names NamesOf(const std::vector<WriteTensor>& tensors) {
  Names names;
  std::unordered_map<std::string_view, uint32_t> known;
  known.reserve(tensors.size());
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const auto [at, added] = known.try_emplace(tensors[i].name, i);
    if (added) {
      names.first.push_back(i);
      continue;
    }
    std::vector<uint32_t>& all = names.several[at->second];
    if (all.empty()) all.push_back(at->second);
    all.push_back(i);
  }
  return names;
}

// Makes the entries of one file, and where the bytes of each come from.
class Entries {
 public:
  Entries(const std::vector<SourceTensor>& sources, MemorySources* memory,
          JoinedBoxes* joined)
      : sources_(sources), memory_(memory), joined_(joined) {}

  void Reserve(size_t count) {
    entries_.reserve(count);
    shards_.reserve(count);
    begins_.reserve(count + 1);
    data_.Reserve(count);
  }

  // An entry of one box.
  void Add(WriteTensor&& tensor) {
    Begin(std::move(tensor.name), tensor.dtype, tensor.shape,
          {tensor.offsets, tensor.global_shape, {}});
    Append(tensor.source);
  }

  // Of those of `tensors` at the positions `all`, which have one name.
  Status AddSeveral(std::vector<WriteTensor>& tensors,
                    std::vector<uint32_t> all) {
    const WriteTensor& first = tensors[all[0]];
    for (const uint32_t i : all) {
      if (tensors[i].dtype == first.dtype &&
          tensors[i].global_shape == first.global_shape) {
        continue;
      }
      return InvalidArgument("has boxes of " +
                             std::string(DtypeName(first.dtype)) + " " +
                             first.global_shape.ToString() + " and of " +
                             DtypeName(tensors[i].dtype) + " " +
                             tensors[i].global_shape.ToString());
    }
    const uint32_t any = all[0];
    std::erase_if(all, [&](uint32_t i) { return BoxOf(tensors[i]).Empty(); });
    if (all.size() <= 1) {
      Add(std::move(tensors[all.empty() ? any : all[0]]));
      return {};
    }
    std::sort(all.begin(), all.end(), [&](uint32_t a, uint32_t b) {
      return std::lexicographical_compare(
          tensors[a].offsets.begin(), tensors[a].offsets.end(),
          tensors[b].offsets.begin(), tensors[b].offsets.end());
    });
    std::vector<Box> boxes;
    for (const uint32_t i : all) boxes.push_back(BoxOf(tensors[i]));
    const std::optional<Box> whole = joined_ ? JoinBoxes(boxes) : std::nullopt;
    if (whole) return AddJoined(tensors, all, *whole);
    TC_RETURN_IF_ERROR(ProveDisjoint(boxes));
    int64_t elements = 0;
    for (const Box& box : boxes) elements += box.sizes.Product();
    Begin(first.name, first.dtype, {elements},
          {{0}, first.global_shape, std::move(boxes)});
    for (const uint32_t i : all) Append(tensors[i].source);
    return {};
  }

  Result<DataLayout> Finish(const std::string& id, Texts* texts) && {
    DataLayout layout;
    const std::vector<uint32_t> order = LayOutFile(&entries_);
    ShardingInfo& sharding = layout.parsed.sharding;
    sharding.entries.reserve(order.size());
    for (const uint32_t i : order) {
      sharding.entries.push_back(std::move(shards_[i]));
    }
    TC_ASSIGN_OR_RETURN(
        std::string header,
        BuildSafetensorsHeader(
            BuildFileMetadata(id, entries_, &sharding.entries), entries_));
    layout.extents.Reserve(data_.extents().size() + 1);
    layout.header = texts->Append(std::move(header), &layout.extents);
    begins_.push_back(data_.size());
    for (const uint32_t i : order) {
      data_.ForEach(begins_[i], begins_[i + 1] - begins_[i],
                    [&](Origin origin, uint64_t, uint64_t bytes) {
                      layout.extents.Append(origin, bytes);
                    });
    }
    layout.parsed.header.tensors = std::move(entries_);
    layout.parsed.header.data_begin = layout.header.size();
    layout.parsed.header.file_bytes = layout.extents.size();
    sharding.file_id = id;
    sharding.has_sharding_info = true;
    return layout;
  }

 private:
  static Box BoxOf(const WriteTensor& tensor) {
    return {tensor.offsets, tensor.shape};
  }

  void Begin(std::string name, Dtype dtype, const Dims& shape,
             ShardEntry shard) {
    entries_.push_back({std::move(name), dtype, shape, 0, 0});
    shards_.push_back(std::move(shard));
    begins_.push_back(data_.size());
  }

  void Append(size_t source) {
    data_.Append(memory_->Of(source), sources_[source].bytes());
  }

  // The tensors tile `box`.
  Status AddJoined(const std::vector<WriteTensor>& tensors,
                   const std::vector<uint32_t>& all, const Box& box) {
    std::vector<JoinedBox> within;
    bool in_rows = true;
    uint64_t bytes = 0;
    for (const uint32_t i : all) {
      Box each = BoxOf(tensors[i]);
      for (int d = 0; d < each.rank(); ++d) each.offsets[d] -= box.offsets[d];
      TC_ASSIGN_OR_RETURN(const ByteBox in_bytes,
                          ByteBox::Make(tensors[i].dtype, box.sizes, each));
      in_rows &= in_bytes.InARow();
      bytes += in_bytes.size();
      within.push_back({0, in_bytes, memory_->Of(tensors[i].source)});
    }
    Begin(tensors[all[0]].name, tensors[all[0]].dtype, box.sizes,
          {box.offsets, tensors[all[0]].global_shape, {}});
    if (!in_rows) {
      data_.Append(joined_->Add(std::move(within)), bytes);
      return {};
    }
    // Sorted by their offsets they stand in the order of their bytes.
    for (const uint32_t i : all) Append(tensors[i].source);
    return {};
  }

  const std::vector<SourceTensor>& sources_;
  MemorySources* const memory_;
  JoinedBoxes* const joined_;
  std::vector<SafetensorsEntry> entries_;
  std::vector<ShardEntry> shards_;  // of each entry
  ExtentList data_;                 // of all entries, one after another
  std::vector<uint64_t> begins_;    // of each, in data_
};

}  // namespace

Status CheckSource(const WriteTensor& tensor,
                   const std::vector<SourceTensor>& sources) {
  Status checked = tensor.source < sources.size()
                       ? CheckBytes(tensor, sources[tensor.source])
                       : InvalidArgument("has no source");
  return std::move(checked).WithTensor(tensor.name);
}

Result<DataLayout> LayOutData(std::vector<WriteTensor>* tensors,
                              const std::string& id,
                              const std::vector<SourceTensor>& sources,
                              MemorySources* memory, JoinedBoxes* joined,
                              Texts* texts) {
  for (const WriteTensor& tensor : *tensors) {
    TC_RETURN_IF_ERROR(CheckSource(tensor, sources));
  }
  const Names names = NamesOf(*tensors);
  Entries entries(sources, memory, joined);
  entries.Reserve(tensors->size());
  for (const uint32_t first : names.first) {
    const auto several = names.several.find(first);
    if (several == names.several.end()) {
      entries.Add(std::move((*tensors)[first]));
      continue;
    }
    TC_RETURN_IF_ERROR(entries.AddSeveral(*tensors, several->second)
                           .WithTensor((*tensors)[first].name));
  }
  return std::move(entries).Finish(id, texts);
}

}  // namespace torch_ckpt
