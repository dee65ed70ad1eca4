#include "engine/open/rank_manifests.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "engine/open/build_catalog.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

// Ranks that a message names before it says how many more there are.
constexpr int64_t kNamedRanks = 16;

std::string NameOf(const Manifest& part) {
  return PartManifestName(part.part->rank, part.part->world_size);
}

// A total order of what placements hold, in which equals are neighbours.
bool HeldLess(const Placement& a, const Placement& b) {
  if (a.begin != b.begin) return a.begin < b.begin;
  if (a.end != b.end) return a.end < b.end;
  const Box &x = a.box, &y = b.box;  // empty in ranges
  if (x.rank() != y.rank()) return x.rank() < y.rank();
  for (int d = 0; d < x.rank(); ++d) {
    if (x.offsets[d] != y.offsets[d]) return x.offsets[d] < y.offsets[d];
    if (x.sizes[d] != y.sizes[d]) return x.sizes[d] < y.sizes[d];
  }
  return false;
}

// What one part's catalog says an entry is, for messages.
template <class Entry>
std::string Describe(const Entry& entry) {
  if (entry.kind == EntryKind::kObject) return "no tensor";
  if (entry.kind == EntryKind::kAlias)
    return "an alias of " + std::string(entry.alias_of);
  return DtypeName(entry.dtype) + (" " + entry.shape.ToString());
}

Status CheckSame(const CatalogBuilder::Entry& a, const CatalogEntry& b,
                 size_t rank_a, size_t rank_b) {
  // Of an object that several ranks have the lowest one's counts.
  const bool same =
      a.kind == b.kind && (a.kind == EntryKind::kObject ||
                           (a.kind == EntryKind::kAlias
                                ? a.alias_of == b.alias_of
                                : a.dtype == b.dtype && a.shape == b.shape));
  if (same) return {};
  return Conflict("is " + Describe(a) + " in the part of rank " +
                  std::to_string(rank_a) + " and " + Describe(b) +
                  " in that of rank " + std::to_string(rank_b))
      .WithTensor(a.name);
}

Result<uint32_t> AddLike(const CatalogEntry& entry, uint32_t first_file,
                         CatalogBuilder* out) {
  std::string name(entry.name);
  switch (entry.kind) {
    case EntryKind::kAlias:
      return out->AddAlias(std::move(name), std::string(entry.alias_of));
    case EntryKind::kObject:
      return out->AddObject(std::move(name), first_file + entry.file);
    case EntryKind::kTensor:
      break;
  }
  return out->AddTensor(std::move(name), entry.dtype, entry.shape);
}

// Of several owners of one box all but the first become replicas. Whether there
// were any.
bool MarkReplicas(std::vector<Placement>* placements) {
  bool any = false;
  std::vector<size_t> order(placements->size());
  std::iota(order.begin(), order.end(), 0);
  const auto less = [&](size_t a, size_t b) {
    return HeldLess((*placements)[a], (*placements)[b]);
  };
  std::stable_sort(order.begin(), order.end(), less);
  for (size_t i = 1; i < order.size(); ++i) {
    if (!less(order[i - 1], order[i])) {
      (*placements)[order[i]].role = PlacementRole::kReplica;
      any = true;
    }
  }
  return any;
}

}  // namespace

Result<Manifest> ReadPart(const Directory& directory, const std::string& name) {
  TC_ASSIGN_OR_RETURN(const std::string text,
                      directory.ReadFile(name, kMaxManifestBytes));
  Result<Manifest> part = ParseManifest(AsBytes(text));
  if (!part.ok()) return part.status().WithFile(directory.Join(name));
  if (!part->part || NameOf(*part) != name) {
    return Corrupt("is not the manifest of the part that its name says")
        .WithFile(directory.Join(name));
  }
  return part;
}

Result<std::vector<Manifest>> ReadParts(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  std::multimap<int64_t, Manifest> by_rank;
  for (const std::string& name : names) {
    if (!IsPartManifestName(name)) continue;
    Result<Manifest> part = ReadPart(directory, name);
    if (!part.ok()) {
      if (part.status().sys_errno() == ENOENT) continue;  // just removed
      return part.status();
    }
    const int64_t rank = part->part->rank;
    by_rank.emplace(rank, std::move(part).value());
  }
  std::vector<Manifest> parts;
  for (auto& [rank, part] : by_rank) parts.push_back(std::move(part));
  return parts;
}

Result<bool> HasPartStaging(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return RankOfPartStage(name).has_value();
  });
}

Status CheckParts(const std::vector<Manifest>& parts) {
  const ManifestPart& first = *parts[0].part;
  for (const Manifest& other : parts) {
    if (other.part->SameSave(first)) continue;
    return Conflict("holds parts of different saves without collectives: " +
                    NameOf(parts[0]) + " and " + NameOf(other));
  }
  // Not more steps than parts and names: the world is what one file says.
  const int64_t missing = first.world_size - static_cast<int64_t>(parts.size());
  if (missing == 0) return {};
  std::string ranks;
  int64_t named = 0;
  size_t next = 0;
  for (int64_t rank = 0; rank < first.world_size && named < kNamedRanks;
       ++rank) {
    if (next < parts.size() && parts[next].part->rank == rank) {
      ++next;
    } else {
      ranks += (named++ ? ", " : " ") + std::to_string(rank);
    }
  }
  if (missing > named) {
    ranks += " and " + std::to_string(missing - named) + " more";
  }
  return Incomplete("the part of rank" + ranks + " of " +
                    std::to_string(first.world_size) +
                    " is missing: the save without collectives is still going "
                    "on, or these ranks died before their commit");
}

std::string PartsSaveId(const std::vector<Manifest>& parts) {
  // The ids are random: their digits added up are as good as any of them, and
  // one part is its own checkpoint.
  std::string id(parts[0].save_id.size(), '0');
  for (const Manifest& part : parts) {
    for (size_t i = 0; i < id.size(); ++i) {
      id[i] = kHexDigits[(kHexDigits.find(id[i]) +
                          kHexDigits.find(part.save_id[i])) %
                         kHexDigits.size()];
    }
  }
  return id;
}

Result<Manifest> MergeManifests(const std::vector<Manifest>& parts) {
  Manifest merged;
  merged.save_id = PartsSaveId(parts);
  merged.world_size = parts[0].world_size;
  merged.metadata = parts[0].metadata;
  std::set<std::string_view> names;
  for (const Manifest& part : parts) {
    for (const ManifestFile& file : part.files) {
      if (!names.insert(file.name).second) {
        return Conflict("is named by the parts of two ranks")
            .WithFile(file.name);
      }
      merged.files.push_back(file);
    }
  }
  return merged;
}

Result<CatalogBuilder> MergeCatalogs(const std::vector<CatalogPart>& parts) {
  CatalogBuilder merged;
  std::vector<size_t> first_rank;  // by merged entry
  uint32_t first_file = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const auto& [part, files] = parts[rank];
    // Ranks mostly have the same tensors, all in the order of names.
    uint32_t next = 0;
    for (uint32_t e = 0; e < part.entries().size(); ++e) {
      const CatalogEntry& entry = part.entries()[e];
      const bool expected =
          next < merged.size() && merged.entry(next).name == entry.name;
      int64_t id = expected ? int64_t{next} : merged.Find(entry.name);
      if (id < 0) {
        TC_ASSIGN_OR_RETURN(id, AddLike(entry, first_file, &merged));
        merged.SetPath(static_cast<uint32_t>(id), std::string(entry.path));
        first_rank.push_back(rank);
      } else {
        const auto at = static_cast<uint32_t>(id);
        TC_RETURN_IF_ERROR(
            CheckSame(merged.entry(at), entry, first_rank[at], rank));
      }
      const auto at = static_cast<uint32_t>(id);
      next = at + 1;
      if (entry.kind != EntryKind::kTensor) continue;
      TC_ASSIGN_OR_RETURN(std::vector<Placement> placements,
                          part.Placements(e, files));
      for (Placement& placement : placements) {
        placement.file += first_file;
        TC_RETURN_IF_ERROR(merged.AddPlacement(at, placement));
      }
    }
    first_file += static_cast<uint32_t>(files.size());
  }
  for (uint32_t e = 0; e < merged.size(); ++e) {
    const CatalogBuilder::Entry& entry = merged.entry(e);
    if (entry.kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(std::vector<Placement> placements,
                        merged.Placements(e));
    if (MarkReplicas(&placements)) merged.SetPlacements(e, placements);
    TC_RETURN_IF_ERROR(
        ProveOwners(entry.shape, placements).WithTensor(entry.name));
  }
  return merged;
}

}  // namespace torch_ckpt
