#include "engine/open/checkpoint.h"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/open/archives.h"
#include "engine/open/build_catalog.h"
#include "format/names.h"

namespace torch_ckpt {

Checkpoint::Checkpoint(Contents contents)
    : has_(std::move(contents)), proved_(has_.catalog.entries().size()) {}

const Checkpoint& Checkpoint::Lender() const {
  if (has_.mapped_from) return has_.mapped_from->Lender();
  return has_.as_stored ? has_.as_stored->Lender() : *this;
}

std::shared_ptr<OpenFiles> Checkpoint::LendFiles(bool direct_io) const {
  if (&Lender() != this) return Lender().LendFiles(direct_io);
  const std::lock_guard lock(mutex_);
  std::weak_ptr<OpenFiles>& lent = lent_[direct_io ? 1 : 0];
  std::shared_ptr<OpenFiles> files = lent.lock();
  if (!files) {
    files = std::make_shared<OpenFiles>(has_.files, direct_io);
    lent = files;
  }
  return files;
}

std::string_view Checkpoint::format() const {
  if (!has_.format.empty()) return has_.format;
  const bool whole = std::none_of(files().begin(), files().end(),
                                  [](const ManifestFile& file) {
                                    return file.role == FileRole::kData &&
                                           IsShardName(FileNameOf(file.name));
                                  });
  const bool any = std::any_of(
      files().begin(), files().end(),
      [](const ManifestFile& file) { return file.role == FileRole::kData; });
  return whole && any ? kWholeFormat : kOurFormat;
}

std::string Checkpoint::CatalogPath() const {
  for (const ManifestFile& file : files()) {
    if (file.role == FileRole::kCatalog) return path() + "/" + file.name;
  }
  return path();
}

Status Checkpoint::Look(uint32_t file,
                        const std::function<Status(const File&)>& look,
                        OpenFiles* files) const {
  if (&Lender() != this) return Lender().Look(file, look, files);
  std::shared_ptr<OpenFiles> lent;
  if (!files) {
    const std::lock_guard lock(mutex_);
    for (const auto& each : lent_) lent = lent ? lent : each.lock();
    files = lent.get();
  }
  const auto name = [](Status looked, const std::string& path) {
    const bool named = looked.ok() || !looked.file().empty();
    return named ? looked : std::move(looked).WithFile(path);
  };
  if (files) {
    return files->Read(file, [&](const ByteSource& source) {
      return name(source.ThroughCache(look), source.path());
    });
  }
  return file_set()->UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(const File opened, file_set()->OpenFile(file));
    return name(look(opened), opened.path());
  });
}

bool Checkpoint::MayBePart(std::span<const Placement> placements) const {
  return !has_.archives.empty() &&
         std::all_of(placements.begin(), placements.end(),
                     [&](const Placement& placement) {
                       return placement.kind == PlacementKind::kStridedBox;
                     });
}

Status Checkpoint::ProveTiled(uint32_t entry,
                              std::span<const Placement> placements) const {
  const CatalogEntry& e = catalog().entries()[entry];
  std::atomic<bool>& is_proved = proved_[catalog().TensorOf(entry)];
  if (e.kind == EntryKind::kObject || is_proved) return {};
  const Status proved = ProveOwners(e.shape, placements);
  if (!proved.ok() && MayBePart(placements)) {
    const uint32_t file =
        placements.empty() ? has_.archives[0].file : placements[0].file;
    return Incomplete("is a DTensor of which one rank saved its part: " +
                      proved.message())
        .WithTensor(std::string(e.name))
        .WithFile(path() + "/" + files()[file].name);
  }
  if (!proved.ok()) {
    return Status(ErrorKind::kCorrupt, proved.message())
        .WithTensor(std::string(e.name))
        .WithFile(CatalogPath());
  }
  is_proved = true;
  return {};
}

std::string_view Checkpoint::StoredName(uint32_t entry) const {
  const std::string_view name = catalog().entries()[entry].name;
  const auto renamed = has_.stored_names.find(name);
  return renamed == has_.stored_names.end() ? name : renamed->second;
}

const UnreadTensor* Checkpoint::FindUnread(uint32_t entry) const {
  if (has_.unread.empty()) return nullptr;
  const auto found = has_.unread.find(StoredName(entry));
  return found == has_.unread.end() ? nullptr : &found->second;
}

const ScaledTensor* Checkpoint::FindScaled(uint32_t entry) const {
  if (has_.scaled.empty()) return nullptr;
  const auto found = has_.scaled.find(StoredName(entry));
  return found == has_.scaled.end() ? nullptr : &found->second;
}

const DerivedTensor* Checkpoint::FindDerived(std::string_view name) const {
  if (has_.derived.empty()) return nullptr;
  const auto found = has_.derived.find(name);
  return found == has_.derived.end() ? nullptr : &found->second;
}

bool Checkpoint::MakesNumbers(uint32_t entry) const {
  if (FindScaled(entry) != nullptr) return true;
  const DerivedTensor* const derived =
      FindDerived(catalog().entries()[entry].name);
  return derived != nullptr && derived->scaled;
}

bool Checkpoint::IsCommon(uint32_t entry) const {
  return !has_.common.empty() && has_.common.contains(StoredName(entry));
}

Status Checkpoint::CheckRead(uint32_t entry) const {
  const UnreadTensor* unread = FindUnread(entry);
  if (!unread) return {};
  const CatalogEntry& e = catalog().entries()[entry];
  return Unsupported(unread->reason + ", and is not read")
      .WithTensor(std::string(e.name))
      .WithFile(e.kind == EntryKind::kObject
                    ? path() + "/" + files()[e.file].name
                    : path());
}

Result<StoredView::Resolved> Checkpoint::Resolve(uint32_t entry,
                                                 const Placement& archive,
                                                 OpenFiles* files) const {
  const CatalogEntry& e = catalog().entries()[entry];
  StoredView::Resolved found;
  const auto look = [&](const File& file) -> Status {
    TC_ASSIGN_OR_RETURN(const bool zip, IsTorchArchive(file, archive.offset));
    if (!zip) {
      TC_ASSIGN_OR_RETURN(
          found.placement,
          blobs_.Resolve(file, archive, StoredName(entry), e.dtype));
      return {};
    }
    TC_ASSIGN_OR_RETURN(found, ResolveArchive(file, archive, e.dtype));
    return {};
  };
  const auto look_there = [&](const File& file) -> Status {
    const Status looked = look(file);
    if (looked.ok()) return {};
    return Status(looked).WithFile(file.path() + " from byte " +
                                   std::to_string(archive.offset) + " on");
  };
  const Status resolved = Look(archive.file, look_there, files);
  if (!resolved.ok()) return Status(resolved).WithTensor(std::string(e.name));
  return found;
}

DigestedRange Checkpoint::StorageAt(uint32_t file, uint64_t offset) const {
  // The last one that begins at or before it.
  const auto after = std::upper_bound(
      has_.storages.begin(), has_.storages.end(), std::pair(file, offset),
      [](const std::pair<uint32_t, uint64_t>& at, const DigestedRange& each) {
        return at < std::pair(each.file, each.range.begin);
      });
  if (after == has_.storages.begin()) return {};
  const DigestedRange& storage = *(after - 1);
  const bool inside = storage.file == file && offset < storage.range.end;
  return inside ? storage : DigestedRange{};
}

Result<std::vector<Placement>> Checkpoint::ProvedPlacements(
    uint32_t entry) const {
  TC_RETURN_IF_ERROR(CheckRead(entry));
  if (FindDerived(catalog().entries()[entry].name) != nullptr) {
    return Unsupported(
               "is made of several tensors, and has no place of its own")
        .WithTensor(std::string(catalog().entries()[entry].name))
        .WithFile(path());
  }
  Result<std::vector<Placement>> placements =
      catalog().Placements(entry, files());
  if (!placements.ok()) {
    return Status(placements.status()).WithFile(CatalogPath());
  }
  // Digests say that the catalog is what was written, not that it is true; and
  // what follows relies on boxes that tile.
  TC_RETURN_IF_ERROR(ProveTiled(entry, *placements));
  return placements;
}

Result<StoredViewPtr> Checkpoint::View(uint32_t entry) const {
  return views_.Get(entry, [&]() -> Result<StoredViewPtr> {
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        ProvedPlacements(entry));
    StoredView::FindStorage find_storage;
    if (!has_.storages.empty()) {
      find_storage = [this](uint32_t file, uint64_t offset) {
        return StorageAt(file, offset);
      };
    }
    return StoredView::Make(
        catalog().entries()[entry], placements,
        [this, entry](const Placement& archive) {
          return Resolve(entry, archive);
        },
        std::move(find_storage));
  });
}

Result<std::vector<Placement>> Checkpoint::Placements(uint32_t entry) const {
  TC_ASSIGN_OR_RETURN(std::vector<Placement> placements,
                      ProvedPlacements(entry));
  const bool any = std::any_of(
      placements.begin(), placements.end(), [](const Placement& placement) {
        return placement.kind == PlacementKind::kArchive;
      });
  // A file may have several.
  const auto files = any ? LendFiles(true) : nullptr;
  for (Placement& placement : placements) {
    if (placement.kind != PlacementKind::kArchive) continue;
    TC_ASSIGN_OR_RETURN(StoredView::Resolved found, Resolve(entry, placement));
    placement = std::move(found.placement);
  }
  return placements;
}

Result<std::vector<Placement>> Checkpoint::DescribedPlacements(
    uint32_t entry) const {
  Result<std::vector<Placement>> placements =
      catalog().Placements(entry, files());
  if (placements.ok() && MayBePart(*placements)) return placements;
  return Placements(entry);
}

Result<std::vector<Checkpoint::Archive>> Checkpoint::Archives() const {
  std::vector<Archive> out;
  // Objects may share one.
  std::set<std::pair<uint32_t, uint64_t>> known;
  const auto add = [&](uint32_t file, ByteRange range) {
    if (range.size() == 0 || !known.emplace(file, range.begin).second) return;
    Archive& archive = out.emplace_back();
    archive.placement.kind = PlacementKind::kArchive;
    archive.placement.file = file;
    archive.placement.offset = range.begin;
    archive.placement.bytes = range.size();
  };
  for (const TorchArchivePlace& each : has_.archives) {
    add(each.file, each.range);
  }
  const std::vector<CatalogEntry>& entries = catalog().entries();
  for (uint32_t e = 0; e < entries.size(); ++e) {
    if (entries[e].archived) add(entries[e].file, entries[e].archived->archive);
    if (entries[e].kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog().Placements(e, files()));
    for (const Placement& placement : placements) {
      if (placement.kind == PlacementKind::kArchive) {
        out.push_back({placement, e});
      }
    }
  }
  return out;
}

Result<std::vector<Result<std::string>>> Checkpoint::ArchivedObjects(
    std::span<const uint32_t> wanted) const {
  const std::vector<CatalogEntry>& entries = catalog().entries();
  std::vector<Result<std::string>> out(wanted.size(), std::string());
  // By archive, so that each is read once: the positions in `wanted`.
  std::map<std::pair<uint32_t, uint64_t>, std::vector<size_t>> archives;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const CatalogEntry& entry = entries[wanted[i]];
    const auto made = has_.made_objects.find(StoredName(wanted[i]));
    if (FindUnread(wanted[i])) {
      out[i] = CheckRead(wanted[i]);
    } else if (made != has_.made_objects.end()) {
      out[i] = made->second;
    } else {
      archives[{entry.file, entry.archived->archive.begin}].push_back(i);
    }
  }
  std::vector<uint32_t> read;
  const auto opened = archives.empty() ? nullptr : LendFiles(true);
  for (const auto& [place, members] : archives) {
    const uint32_t number = place.first;
    const ByteRange range = entries[wanted[members[0]]].archived->archive;
    std::vector<uint64_t> leaves;
    for (const size_t i : members) {
      leaves.push_back(entries[wanted[i]].archived->leaf);
    }
    std::vector<Result<std::string>> objects;
    const Status looked = Look(number, [&](const File& file) -> Status {
      TC_ASSIGN_OR_RETURN(objects, ReadArchivedObjects(file, range, leaves));
      return {};
    });
    for (size_t m = 0; m < members.size(); ++m) {
      const Status status = looked.ok() ? objects[m].status() : looked;
      Result<std::string>* const object = &out[members[m]];
      if (status.ok()) {
        *object = std::move(objects[m]);
      } else {
        *object = Status(status)
                      .WithTensor(std::string(entries[wanted[members[m]]].name))
                      .WithFile(path() + "/" + files()[number].name);
      }
    }
    read.push_back(number);
  }
  TC_RETURN_IF_ERROR(file_set()->CheckUnchanged(read));
  return out;
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Without(
    const std::set<std::string, std::less<>>& names) const {
  if (has_.mapped_from) {
    return Unsupported("is mapped, and leaves nothing out as well")
        .WithFile(path());
  }
  Contents left = has_;
  TC_ASSIGN_OR_RETURN(left.catalog, catalog().Without(names, files()));
  return std::make_shared<const Checkpoint>(std::move(left));
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Renamed(
    const std::map<std::string, std::string>& new_names) const {
  if (has_.mapped_from) {
    return Unsupported("is mapped, and is not renamed as well")
        .WithFile(path());
  }
  Contents renamed = has_;
  TC_ASSIGN_OR_RETURN(renamed.catalog, catalog().Renamed(new_names, files()));
  for (const auto& each : new_names) renamed.stored_names.erase(each.first);
  for (const auto& [name, new_name] : new_names) {
    const auto before = has_.stored_names.find(name);
    renamed.stored_names[new_name] =
        before == has_.stored_names.end() ? name : before->second;
  }
  return std::make_shared<const Checkpoint>(std::move(renamed));
}

Result<Checkpoint::Dequantized> Checkpoint::Dequantize(
    std::shared_ptr<const Checkpoint> checkpoint, const ScaleOptions& options) {
  Result<ScaledCatalog> paired =
      PairScales(checkpoint->catalog(), checkpoint->files(), options);
  if (!paired.ok()) {
    return Status(paired.status()).WithFile(checkpoint->path());
  }
  // Numbers would lose the scales that they are made with.
  if (!paired->scaled.empty() &&
      (!checkpoint->has_.scaled.empty() || checkpoint->has_.mapped_from)) {
    return Unsupported(
               "is stored as codes and scales, of which others are numbers "
               "already: it is read as codes, or all are numbers at once")
        .WithTensor(paired->scaled.begin()->first)
        .WithFile(checkpoint->path());
  }
  Contents contents = checkpoint->has_;
  contents.catalog = std::move(paired->catalog);
  contents.scaled = std::move(paired->scaled);
  contents.as_stored = std::move(checkpoint);
  return Dequantized{std::make_shared<const Checkpoint>(std::move(contents)),
                     std::move(paired->unscaled), std::move(paired->orphans),
                     std::move(paired->misfits)};
}

Result<Checkpoint::Mapped> Checkpoint::Map(
    std::shared_ptr<const Checkpoint> checkpoint,
    const std::vector<MappingPair>& pairs,
    const std::vector<NativeTensor>& natives, const Numbers& numbers) {
  Result<MappedCatalog> mapped =
      DeriveCatalog(*checkpoint, pairs, natives, numbers);
  return WithMapped(std::move(checkpoint), std::move(mapped));
}

Result<Checkpoint::Mapped> Checkpoint::MapOntoNew(
    std::shared_ptr<const Checkpoint> checkpoint,
    const std::vector<MappingPair>& pairs, const Numbers& numbers) {
  Result<MappedCatalog> mapped = DeriveNewCatalog(*checkpoint, pairs, numbers);
  return WithMapped(std::move(checkpoint), std::move(mapped));
}

Result<Checkpoint::Mapped> Checkpoint::WithMapped(
    std::shared_ptr<const Checkpoint> checkpoint,
    Result<MappedCatalog> mapped) {
  if (!mapped.ok()) {
    return Status(mapped.status()).WithFile(checkpoint->path());
  }
  Contents contents = checkpoint->has_;
  contents.catalog = std::move(mapped->catalog);
  contents.derived = std::move(mapped->derived);
  contents.mapped_from = std::move(checkpoint);
  return Mapped{std::make_shared<const Checkpoint>(std::move(contents)),
                std::move(mapped->partly), std::move(mapped->unmatched)};
}

}  // namespace torch_ckpt
