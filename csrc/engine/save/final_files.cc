#include "engine/save/final_files.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>

#include "format/binary.h"
#include "plan/layout.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kListName = "final_files";
constexpr std::string_view kListMagic = "TCKPTFIN";
constexpr uint64_t kMaxListBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxRank = uint64_t{1} << 31;

std::string EncodeList(const FinalFiles& list) {
  std::string out(kListMagic);
  PutVarint(&out, list.files.size());
  for (const StagedFile& file : list.files) {
    PutString(&out, file.name);
    PutString(&out, file.staged);
    PutString(&out, file.id);
    PutVarint(&out, file.bytes);
  }
  PutString(&out, list.index_name);
  PutVarint(&out, list.rings.size());
  for (const FinalRing& ring : list.rings) {
    PutVarint(&out, static_cast<uint64_t>(ring.leader));
    PutVarint(&out, ring.senders.size());
    for (const int64_t rank : ring.senders) {
      PutVarint(&out, static_cast<uint64_t>(rank));
    }
  }
  PutVarint(&out, list.banded.size());
  for (const FinalFiles::Banded& tensor : list.banded) {
    PutVarint(&out, tensor.tensor.file);
    PutVarint(&out, tensor.tensor.entry);
    PutVarint(&out, tensor.bands.size());
    for (const FinalBand& band : tensor.bands) {
      PutVarint(&out, static_cast<uint64_t>(band.ring + 1));
      PutVarint(&out, static_cast<uint64_t>(band.begin));
      PutVarint(&out, static_cast<uint64_t>(band.end));
    }
  }
  PutCrc(&out);
  return out;
}

// The bands behind the files and rings of a list; false where they are none.
bool ReadBands(BinaryReader* in, FinalFiles* list) {
  const auto banded = in->Bounded(in->left());
  if (!banded) return false;
  for (uint64_t i = 0; i < *banded; ++i) {
    const auto file = in->Bounded(UINT32_MAX);
    const auto entry = in->Bounded(UINT32_MAX);
    const auto bands = in->Bounded(in->left());
    if (!file || !entry || !bands || *file >= list->files.size()) return false;
    const FinalPlace place{static_cast<uint32_t>(*file),
                           static_cast<uint32_t>(*entry)};
    if (i > 0 && list->banded.back().tensor >= place) return false;
    FinalFiles::Banded& tensor = list->banded.emplace_back();
    tensor.tensor = place;
    for (uint64_t b = 0; b < *bands; ++b) {
      const auto ring = in->Bounded(list->rings.size());
      const auto begin = in->Bounded(INT64_MAX);
      const auto end = in->Bounded(INT64_MAX);
      if (!ring || !begin || !end) return false;
      tensor.bands.push_back({static_cast<int64_t>(*ring) - 1,
                              static_cast<int64_t>(*begin),
                              static_cast<int64_t>(*end)});
    }
  }
  return true;
}

Result<FinalFiles> DecodeList(ByteSpan bytes) {
  TC_ASSIGN_OR_RETURN(const ByteSpan body,
                      BinaryBody(bytes, kListMagic, "list of final files"));
  BinaryReader in(body);
  const Status malformed = Corrupt("the list of final files is malformed");
  FinalFiles list;
  const auto files = in.Bounded(in.left());
  if (!files) return malformed;
  for (uint64_t i = 0; i < *files; ++i) {
    const auto name = in.String(kMaxNameBytes);
    const auto staged = in.String(kMaxNameBytes);
    const auto id = in.String(kMaxNameBytes);
    const auto file_bytes = in.Bounded(UINT64_MAX >> 1);
    if (!name || !staged || !id || !IsId(*id) || !file_bytes) return malformed;
    TC_RETURN_IF_ERROR(CheckFilePath(*name));
    TC_RETURN_IF_ERROR(CheckFileName(*staged));
    list.files.push_back(
        {{*name, *id, FileRole::kData, *file_bytes, {}}, *staged});
  }
  const auto index_name = in.String(kMaxNameBytes);
  const auto rings = in.Bounded(in.left());
  if (!index_name || !rings) return malformed;
  list.index_name = *index_name;
  for (uint64_t i = 0; i < *rings; ++i) {
    const auto leader = in.Bounded(kMaxRank);
    const auto senders = in.Bounded(in.left());
    if (!leader || !senders) return malformed;
    FinalRing ring{static_cast<int64_t>(*leader), {}};
    for (uint64_t s = 0; s < *senders; ++s) {
      const auto rank = in.Bounded(kMaxRank);
      if (!rank) return malformed;
      ring.senders.push_back(static_cast<int64_t>(*rank));
    }
    list.rings.push_back(std::move(ring));
  }
  if (!ReadBands(&in, &list) || !in.empty()) return malformed;
  return list;
}

Status CheckBands(const FinalTensor& tensor, size_t rings) {
  int64_t at = 0;
  std::set<int64_t> used;
  for (const FinalBand& band : tensor.bands) {
    if (tensor.shape.empty() || band.begin < at || band.begin >= band.end ||
        band.end > tensor.shape[0] || band.ring < -1 ||
        band.ring >= static_cast<int64_t>(rings) ||
        (band.ring >= 0 && !used.insert(band.ring).second)) {
      return InvalidArgument(
                 "its bands are no rows of it, in order, each of "
                 "a ring of its own")
          .WithTensor(tensor.name);
    }
    at = band.end;
  }
  return {};
}

// The file at full size, with its header.
Status StageFile(const Directory& staging, const FinalLayout& layout,
                 bool sync) {
  TC_RETURN_IF_ERROR(CreateOutput(staging, layout.file));
  TC_ASSIGN_OR_RETURN(File file,
                      staging.OpenFile(layout.file.staged, {.write = true}));
  TC_RETURN_IF_ERROR(file.WriteAll(AsBytes(layout.header), 0));
  if (sync) TC_RETURN_IF_ERROR(file.Sync());
  TC_RETURN_IF_ERROR(file.Close());
  FileHeader parsed;
  parsed.header.tensors = layout.tensors;
  parsed.header.data_begin = layout.header.size();
  parsed.header.file_bytes = layout.file.bytes;
  parsed.sharding.file_id = layout.file.id;
  return StageHeader(staging, layout.file.staged, parsed, layout.header);
}

Status WriteList(const Directory& staging, const FinalFiles& list) {
  TC_ASSIGN_OR_RETURN(File out,
                      staging.OpenFile(std::string(kListName),
                                       {.write = true, .create_new = true}));
  const std::string text = EncodeList(list);
  if (text.size() > kMaxListBytes) {
    return Unsupported("the list of what ranks are to write has " +
                       std::to_string(text.size()) + " bytes, of " +
                       std::to_string(kMaxListBytes) + " at most");
  }
  TC_RETURN_IF_ERROR(out.WriteAll(AsBytes(text), 0));
  return out.Close();
}

}  // namespace

Result<const FinalBand*> FinalFiles::BandOf(FinalPlace tensor,
                                            const Box& box) const {
  const auto found = std::lower_bound(
      banded.begin(), banded.end(), tensor,
      [](const Banded& a, FinalPlace b) { return a.tensor < b; });
  if (found == banded.end() || found->tensor != tensor || box.rank() == 0) {
    return nullptr;
  }
  const int64_t begin = box.offsets[0], end = begin + box.sizes[0];
  for (const FinalBand& band : found->bands) {
    if (band.end <= begin || band.begin >= end) continue;
    if (band.begin <= begin && end <= band.end) return &band;
    return Conflict("rows " + std::to_string(begin) + " to " +
                    std::to_string(end) + " are only in part among rows " +
                    std::to_string(band.begin) + " to " +
                    std::to_string(band.end) +
                    ", which ranks are planned to write together: the plan is "
                    "for other tensors");
  }
  return nullptr;
}

NewFiles NewFilesOf(const FinalFiles& list) {
  NewFiles files;
  for (const StagedFile& file : list.files) files.names.push_back(file.name);
  if (!list.index_name.empty()) files.names.push_back(list.index_name);
  return files;
}

Result<SafetensorsEntry> EntryOf(const SafetensorsEntry& tensor,
                                 const FinalBand& band) {
  SafetensorsEntry entry = tensor;
  if (entry.shape.empty() || band.end > entry.shape[0]) {
    return Corrupt("has no rows " + std::to_string(band.begin) + " to " +
                   std::to_string(band.end))
        .WithTensor(tensor.name);
  }
  entry.shape[0] = band.begin;
  TC_ASSIGN_OR_RETURN(const uint64_t before,
                      ByteSize(entry.dtype, entry.shape));
  entry.shape[0] = band.end - band.begin;
  TC_ASSIGN_OR_RETURN(const uint64_t bytes, ByteSize(entry.dtype, entry.shape));
  entry.begin += before;
  entry.end = entry.begin + bytes;
  return entry;
}

Box InBand(Box box, const FinalBand& band) {
  box.offsets[0] -= band.begin;
  return box;
}

Result<std::vector<RingTensor>> RingTensorsOf(
    const FinalFiles& list, const std::vector<FileHeader>& headers,
    const FinalRing& ring) {
  std::vector<RingTensor> tensors;
  tensors.reserve(list.banded.size());
  for (const auto& [place, bands] : list.banded) {
    const auto& entries = headers[place.file].header.tensors;
    if (place.entry >= entries.size()) {
      return Corrupt("the list of final files is of other headers")
          .WithFile(list.files[place.file].name);
    }
    for (const FinalBand& band : bands) {
      if (band.ring < 0 ||
          &list.rings[static_cast<size_t>(band.ring)] != &ring) {
        continue;
      }
      TC_ASSIGN_OR_RETURN(SafetensorsEntry of_band,
                          EntryOf(entries[place.entry], band));
      tensors.push_back({place, std::move(of_band)});
    }
  }
  return tensors;
}

Result<FinalLayout> LayOutFinalFile(const std::string& name,
                                    const std::string& id,
                                    std::vector<SafetensorsEntry> tensors) {
  FinalLayout layout;
  layout.order = LayOutFile(&tensors);
  TC_ASSIGN_OR_RETURN(
      layout.header,
      BuildSafetensorsHeader(BuildFileMetadata(id, tensors, /*shards=*/nullptr),
                             tensors));
  const uint64_t data_bytes = tensors.empty() ? 0 : tensors.back().end;
  layout.tensors = std::move(tensors);
  layout.file =
      ToBeStaged(name, id, FileRole::kData, layout.header.size() + data_bytes);
  return layout;
}

Result<FinalFiles> StageFinalFiles(const Directory& staging,
                                   const std::vector<FinalTensor>& tensors,
                                   const FileRule& rule,
                                   const FileNaming& naming, bool sync,
                                   std::vector<FinalRing> rings) {
  std::vector<std::string_view> names;
  std::vector<uint64_t> bytes;
  FinalFiles list;
  for (const FinalTensor& tensor : tensors) {
    const Result<uint64_t> size = ByteSize(tensor.dtype, tensor.shape);
    if (!size.ok()) return size.status().WithTensor(tensor.name);
    names.push_back(tensor.name);
    bytes.push_back(*size);
    TC_RETURN_IF_ERROR(CheckBands(tensor, rings.size()));
  }
  list.rings = std::move(rings);
  TC_ASSIGN_OR_RETURN(const FileDivision division,
                      DivideIntoFiles(names, bytes, rule));
  list.index_name = IndexFileName(division.count, naming);
  struct Members {
    std::vector<SafetensorsEntry> entries;
    std::vector<const FinalTensor*> tensors;
  };
  std::map<int64_t, Members> files;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (division.index[i] == 0) {
      return InvalidArgument("is not in fqn_to_index_mapping")
          .WithTensor(tensors[i].name);
    }
    Members& file = files[division.index[i]];
    file.entries.push_back(
        {tensors[i].name, tensors[i].dtype, tensors[i].shape, 0, 0});
    file.tensors.push_back(&tensors[i]);
  }
  for (auto& [index, members] : files) {
    const std::string name = FinalFileName(index, division.count, naming);
    Result<FinalLayout> layout =
        LayOutFinalFile(name, NewId(), std::move(members.entries));
    if (!layout.ok()) return layout.status().WithFile(name);
    TC_RETURN_IF_ERROR(StageFile(staging, *layout, sync));
    for (uint32_t entry = 0; entry < layout->order.size(); ++entry) {
      const FinalTensor& tensor = *members.tensors[layout->order[entry]];
      if (tensor.bands.empty()) continue;
      const auto file = static_cast<uint32_t>(list.files.size());
      list.banded.push_back({{file, entry}, tensor.bands});
    }
    list.files.push_back(std::move(layout->file));
  }
  TC_RETURN_IF_ERROR(WriteList(staging, list));
  return list;
}

Result<FinalFiles> ReadFinalFiles(const Directory& staging) {
  Result<std::string> text =
      staging.ReadFile(std::string(kListName), kMaxListBytes);
  if (!text.ok()) {
    if (text.status().sys_errno() != ENOENT) return text.status();
    return Incomplete(
               "the coordinator has laid out no final files: every rank "
               "must save with the same layout")
        .WithFile(staging.path());
  }
  Result<FinalFiles> list = DecodeList(AsBytes(*text));
  if (!list.ok()) {
    return list.status().WithFile(staging.Join(std::string(kListName)));
  }
  return list;
}

bool HasFinalFiles(const Directory& staging) {
  const auto info = staging.StatName(std::string(kListName));
  return info.ok() && info->has_value();
}

}  // namespace torch_ckpt
