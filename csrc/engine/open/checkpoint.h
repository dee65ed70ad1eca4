// A checkpoint directory, opened for reading.
//
// Opening never writes. Understood are
//   1. directories with our manifest (torch_ckpt.json, or the journal of a
//      commit that is not replayed yet, or the part manifests of all ranks of a
//      save without collectives): only what it names is read;
//   2. directories of others, and single files: engine/open/catalog_reader.h.
// Of 1 every tensor was proved to be whole before the commit: opening reads the
// manifest and the catalog, whatever they name. A file is compared with the
// manifest when it is opened, a tensor's placements are proved when they are
// first asked for, since a rank of thousands needs few of either.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/open/derived.h"
#include "engine/open/file_set.h"
#include "engine/open/open_files.h"
#include "engine/open/safetensors_blobs.h"
#include "engine/open/scaled.h"
#include "engine/open/stored_view.h"
#include "format/ours/catalog.h"
#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// What says which files a checkpoint of ours has; others have words of their
// readers (engine/open/catalog_reader.h).
inline constexpr std::string_view kManifestSource = "manifest";

// Immutable; const access is thread-safe.
class Checkpoint {
 public:
  struct Contents {
    // All files that count, by which the catalog names them. Without a manifest
    // they have no digests.
    std::shared_ptr<const FileSet> files;
    Catalog catalog;
    std::string_view source = kManifestSource;
    std::string_view format = {};  // its reader's; empty with a manifest
    std::string save_id;           // empty without a manifest
    int64_t world_size = 0;        // 0 without a manifest
    // Not that of another checkpoint: the save id, or what its files are.
    std::string identity;
    // Tensors of a directory that is not ours whose shape no file says: were
    // the last of their shards missing, nobody could see it.
    std::vector<std::string> hulls;
    // Data files of such a directory that are no part of the checkpoint.
    std::vector<std::string> beside;
    // ForeignCatalog's.
    std::vector<std::string> notes;
    std::vector<TorchArchivePlace> archives;
    std::vector<DigestedRange> storages = {};
    std::map<std::string, std::string, std::less<>> made_objects = {};
    std::map<std::string, UnreadTensor, std::less<>> unread = {};
    std::set<std::string, std::less<>> common = {};
    std::vector<std::pair<std::string, std::string>> metadata =
        {};  // Manifest's
    // What entries are called in the files, where that is another name.
    std::map<std::string, std::string, std::less<>> stored_names = {};
    // Of a Dequantized one: how numbers are made of codes, by the name of their
    // entry when it was made, and the checkpoint that has the scales.
    std::map<std::string, ScaledTensor, std::less<>> scaled = {};
    std::shared_ptr<const Checkpoint> as_stored = {};
    // Of a Mapped one: what its tensors are made of, and the checkpoint that
    // has these.
    std::map<std::string, DerivedTensor, std::less<>> derived = {};
    std::shared_ptr<const Checkpoint> mapped_from = {};
  };
  explicit Checkpoint(Contents contents);

  const std::shared_ptr<const FileSet>& file_set() const { return has_.files; }
  const std::string& path() const { return has_.files->path(); }
  const std::vector<ManifestFile>& files() const { return has_.files->files(); }
  const Catalog& catalog() const { return has_.catalog; }
  std::string_view source() const { return has_.source; }
  // The word that people say: kOurFormat for shards of ours; "hf" for whole
  // tensors, whoever wrote them.
  std::string_view format() const;
  const std::string& save_id() const { return has_.save_id; }
  int64_t world_size() const { return has_.world_size; }
  const std::string& identity() const { return has_.identity; }
  const std::vector<std::string>& hulls() const { return has_.hulls; }
  const std::vector<std::string>& beside() const { return has_.beside; }
  const std::vector<std::string>& notes() const { return has_.notes; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return has_.metadata;
  }

  // What is said of an entry that is a tensor which is not read; null of
  // another one. To the catalog it may be an object.
  const UnreadTensor* FindUnread(uint32_t entry) const;
  // Whether it is of a common state: ForeignCatalog::common.
  bool IsCommon(uint32_t entry) const;

  // How numbers are made of the elements of an entry, which are codes then;
  // null of any other.
  const ScaledTensor* FindScaled(uint32_t entry) const;
  // What has the scales that it names.
  const std::shared_ptr<const Checkpoint>& as_stored() const {
    return has_.as_stored;
  }
  // All of them, by the names that Dequantize gave.
  const std::map<std::string, ScaledTensor, std::less<>>& scaled() const {
    return has_.scaled;
  }

  // What an entry is made of that has no placements of its own; null of any
  // other.
  const DerivedTensor* FindDerived(std::string_view name) const;
  // What has the tensors that it names, and all others of this; null where
  // there are none.
  const std::shared_ptr<const Checkpoint>& mapped_from() const {
    return has_.mapped_from;
  }
  // Whether numbers are made of codes for some of its elements.
  bool MakesNumbers(uint32_t entry) const;

  // The files, open as long as somebody holds this: jobs that run at once, or
  // that follow each other while a caller holds it, open each once. Without
  // `direct_io` all bytes come through the page cache.
  std::shared_ptr<OpenFiles> LendFiles(bool direct_io) const;
  // `look`, which reads a few bytes here and there, at one of the files: as
  // `files` have it open; null: as a job has that is going on, or opened for
  // this. Its errors name the file, at which it may look again, see
  // FileSet::UntilSure.
  Status Look(uint32_t file, const std::function<Status(const File&)>& look,
              OpenFiles* files = nullptr) const;
  // A tensor or what it is an alias of, for who reads it. Proves the first time
  // that its owners tile it. It is kept for the next who asks while it is one
  // of those that were asked for last, and is good while this checkpoint lives.
  // kCorrupt names the tensor, kUnsupported one that is not read.
  Result<StoredViewPtr> View(uint32_t entry) const;
  // All placements of it, as they are in their files: none is a kArchive.
  Result<std::vector<Placement>> Placements(uint32_t entry) const;
  // The same, of all boxes, for who looks and does not read: what one rank
  // saved of a DTensor need not tile it.
  Result<std::vector<Placement>> DescribedPlacements(uint32_t entry) const;
  // An archive in a file, as a kArchive, and the tensor that it is.
  struct Archive {
    Placement placement;
    std::optional<uint32_t> tensor;  // none: a state dict, or an object
  };
  // All there are; none in a checkpoint of ours.
  Result<std::vector<Archive>> Archives() const;
  // A kArchive of an entry as what it is in its file. `files`: see Look.
  Result<StoredView::Resolved> Resolve(uint32_t entry, const Placement& archive,
                                       OpenFiles* files = nullptr) const;
  // Objects that are archived, as typed JSON (docs/format.md, section 7). Each
  // may have an error of its own, which names it. REQUIRES: all are archived.
  Result<std::vector<Result<std::string>>> ArchivedObjects(
      std::span<const uint32_t> entries) const;
  // The same checkpoint without some of its entries. What is an alias of one of
  // these becomes a tensor. kUnsupported of a Mapped one.
  Result<std::shared_ptr<const Checkpoint>> Without(
      const std::set<std::string, std::less<>>& names) const;
  // The same checkpoint with a catalog that is Renamed. kUnsupported of a
  // Mapped one.
  Result<std::shared_ptr<const Checkpoint>> Renamed(
      const std::map<std::string, std::string>& new_names) const;
  // `checkpoint` with a catalog that has numbers for codes and scales. Codes
  // that have no scales, and scales that have no codes, are named there.
  struct Dequantized {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::vector<std::string> unscaled, orphans;
    std::vector<ScaledCatalog::Misfit> misfits;
  };
  static Result<Dequantized> Dequantize(
      std::shared_ptr<const Checkpoint> checkpoint,
      const ScaleOptions& options);
  // `checkpoint` with a catalog of DeriveCatalog, or of DeriveNewCatalog.
  struct Mapped {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::vector<PartlyUsed> partly;
    std::vector<size_t> unmatched;
  };
  static Result<Mapped> Map(std::shared_ptr<const Checkpoint> checkpoint,
                            const std::vector<MappingPair>& pairs,
                            const std::vector<NativeTensor>& natives,
                            const Numbers& numbers);
  static Result<Mapped> MapOntoNew(std::shared_ptr<const Checkpoint> checkpoint,
                                   const std::vector<MappingPair>& pairs,
                                   const Numbers& numbers);

 private:
  static Result<Mapped> WithMapped(std::shared_ptr<const Checkpoint> checkpoint,
                                   Result<MappedCatalog> mapped);
  // What all that are made of one checkpoint lend the files of.
  const Checkpoint& Lender() const;
  // Of the catalog, proved to tile the tensor.
  Result<std::vector<Placement>> ProvedPlacements(uint32_t entry) const;
  Status ProveTiled(uint32_t entry,
                    std::span<const Placement> placements) const;
  // Whether they are those of a leaf of a state dict in an archive, which may
  // be what one rank had of a DTensor.
  bool MayBePart(std::span<const Placement> placements) const;
  // That of Contents::storages which has a byte of a file; of crc32 0: none.
  DigestedRange StorageAt(uint32_t file, uint64_t offset) const;
  // The name that an entry has in the files.
  std::string_view StoredName(uint32_t entry) const;
  // kUnsupported, naming it, of a tensor that is not read.
  Status CheckRead(uint32_t entry) const;
  // Of what says which boxes there are, for messages.
  std::string CatalogPath() const;

  const Contents has_;
  mutable std::vector<std::atomic<bool>> proved_;  // by TensorOf
  mutable SafetensorsBlobs blobs_;
  mutable StoredViews views_;
  mutable std::mutex mutex_;                              // guards lent_
  mutable std::array<std::weak_ptr<OpenFiles>, 2> lent_;  // by direct_io
};

// `format`: a word of Checkpoint::format; empty to find out, which prefers our
// manifest. Errors: kIncomplete when there is no checkpoint (of that format) or
// a part of it is missing, kConflict while it is being replaced, kCorrupt,
// kInvalidArgument for another word. On a shared file system these come after
// kPatience only.
Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path, std::string_view format = {});

}  // namespace torch_ckpt
