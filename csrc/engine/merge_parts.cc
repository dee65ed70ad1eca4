#include "engine/merge_parts.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "engine/build_catalog.h"
#include "engine/checkpoint.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

// Ranks that a message names before it says how many more there are.
constexpr int64_t kNamedRanks = 16;

std::string NameOf(const Manifest& part) {
  return PartManifestName(part.part->rank, part.part->world_size);
}

// A total order, in which equal boxes are neighbours.
bool BoxLess(const Box& a, const Box& b) {
  if (a.rank() != b.rank()) return a.rank() < b.rank();
  for (int d = 0; d < a.rank(); ++d) {
    if (a.offsets[d] != b.offsets[d]) return a.offsets[d] < b.offsets[d];
    if (a.sizes[d] != b.sizes[d]) return a.sizes[d] < b.sizes[d];
  }
  return false;
}

// What one part's catalog says an entry is, for messages.
std::string Describe(const CatalogEntry& entry) {
  if (entry.kind == EntryKind::kObject) return "no tensor";
  if (entry.kind == EntryKind::kAlias) return "an alias of " + entry.alias_of;
  return DtypeName(entry.storage_dtype) + (" " + entry.shape.ToString());
}

Status CheckSame(const CatalogEntry& a, const CatalogEntry& b, size_t rank_a,
                 size_t rank_b) {
  if (a.kind == b.kind && a.storage_dtype == b.storage_dtype &&
      a.logical_dtype == b.logical_dtype && a.fill == b.fill &&
      a.shape == b.shape && a.alias_of == b.alias_of) {
    return {};
  }
  return Conflict("is " + Describe(a) + " in the part of rank " +
                  std::to_string(rank_a) + " and " + Describe(b) +
                  " in that of rank " + std::to_string(rank_b))
      .WithTensor(a.name);
}

// Of several owners of one box all but the first become replicas.
void MarkReplicas(std::vector<Placement>* placements) {
  std::vector<size_t> order(placements->size());
  std::iota(order.begin(), order.end(), 0);
  const auto box = [&](size_t i) -> const Box& { return (*placements)[i].box; };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return BoxLess(box(a), box(b)); });
  for (size_t i = 1; i < order.size(); ++i) {
    if (box(order[i - 1]) == box(order[i])) {
      (*placements)[order[i]].role = PlacementRole::kReplica;
    }
  }
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
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string id(parts[0].save_id.size(), '0');
  for (const Manifest& part : parts) {
    for (size_t i = 0; i < id.size(); ++i) {
      id[i] = kDigits[(kDigits.find(id[i]) + kDigits.find(part.save_id[i])) %
                      kDigits.size()];
    }
  }
  return id;
}

Result<Manifest> MergeManifests(const std::vector<Manifest>& parts) {
  Manifest merged;
  merged.save_id = PartsSaveId(parts);
  merged.world_size = parts[0].world_size;
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

Result<Catalog> MergeCatalogs(const std::vector<Catalog>& parts) {
  Catalog merged;
  std::vector<std::vector<Placement>> placements;  // by merged entry
  std::vector<size_t> first_rank;                  // by merged entry
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const Catalog& part = parts[rank];
    const auto first_file = static_cast<uint32_t>(merged.files().size());
    for (const CatalogFile& file : part.files()) merged.AddFile(file);
    for (uint32_t e = 0; e < part.entries().size(); ++e) {
      const CatalogEntry& entry = part.entries()[e];
      int64_t id = merged.Find(entry.name);
      if (id < 0) {
        TC_ASSIGN_OR_RETURN(id, merged.AddEntry(entry));
        placements.emplace_back();
        first_rank.push_back(rank);
      }
      const auto at = static_cast<size_t>(id);
      TC_RETURN_IF_ERROR(
          CheckSame(merged.entries()[at], entry, first_rank[at], rank));
      for (Placement placement : part.placements(e)) {
        placement.file += first_file;
        placements[at].push_back(placement);
      }
    }
  }
  for (uint32_t e = 0; e < placements.size(); ++e) {
    MarkReplicas(&placements[e]);
    for (const Placement& placement : placements[e]) {
      TC_RETURN_IF_ERROR(merged.AddPlacement(e, placement));
    }
  }
  TC_RETURN_IF_ERROR(ProveOwners(merged));
  return merged;
}

}  // namespace torch_ckpt
