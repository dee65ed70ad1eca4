// Reads manifests and journals (manifest.h).
#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "format/json.h"
#include "format/names.h"
#include "format/ours/manifest.h"
#include "format/ours/manifest_text.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

using internal::kContainerNames;
using internal::kCrcDigits;
using internal::kJournalFormat;
using internal::kManifestFormat;
using internal::kTailEnd;
using internal::kTailStart;

constexpr int kDepth = 4;  // journal, manifest, files, file

constexpr size_t kTailBytes = kTailStart.size() + kCrcDigits + kTailEnd.size();

// Whether the last line looks like a checksum, right or wrong.
bool HasTail(std::string_view text) {
  if (text.size() < kTailBytes) return false;
  const std::string_view tail = text.substr(text.size() - kTailBytes);
  return tail.starts_with(kTailStart) && tail.ends_with(kTailEnd);
}

Status CheckTail(std::string_view text) {
  if (text.size() < kTailBytes) return Corrupt("the text is cut short");
  const std::string_view body = text.substr(0, text.size() - kTailBytes);
  const std::string_view tail = text.substr(body.size());
  const auto crc = ParseHex(tail.substr(kTailStart.size(), kCrcDigits));
  if (!tail.starts_with(kTailStart) || !tail.ends_with(kTailEnd) || !crc)
    return Corrupt("the last line is not the checksum");
  if (*crc != Crc32c(0, body.data(), body.size()))
    return Corrupt("the checksum does not match: the text was altered");
  return {};
}

// Reads a manifest or a journal; checks the single values. What relates
// values to each other is checked after the parse.
class DocumentHandler final : public JsonHandler {
 public:
  DocumentHandler(bool journal, Journal* out) : journal_(journal), out_(out) {}

  bool OnKey(std::string_view key) override {
    if (at_ == At::kMetadata) {
      key_ = key;
      return true;
    }
    if (at_ == At::kRoot && keys_ < 2) {
      // Whoever made the text, these two come first, so that another version
      // is told from a damaged file.
      if (key != (keys_ == 0 ? "format" : "version"))
        return Refuse("format and version do not come first");
    } else {
      if (at_ == At::kRoot && !versioned_) return Refuse("no version");
      const auto known = KnownKeys();
      const auto found = std::find(known.begin(), known.end(), key);
      if (found == known.end()) return Refuse("unknown key");
    }
    if (at_ == At::kRoot) ++keys_;
    ++seen_[static_cast<size_t>(at_)];
    key_ = key;
    return true;
  }

  bool OnString(std::string_view text) override {
    switch (at_) {
      case At::kRoot:
        if (key_ == "format") {
          if (text != (journal_ ? kJournalFormat : kManifestFormat))
            return Refuse("this is another kind of file");
          return true;
        }
        if (key_ == "crc32c") return true;  // CheckTail
        return !journal_ && key_ == "save_id" ? Id(text, &Target().save_id)
                                              : Refuse("unexpected string");
      case At::kManifest:
        return key_ == "save_id" ? Id(text, &Target().save_id)
                                 : Refuse("unexpected string");
      case At::kFile:
        return FileString(text);
      case At::kRename:
        return key_ == "from" ? Name(text, &out_->renames.back().from)
                              : Path(text, &out_->renames.back().to);
      case At::kRemoves: {
        std::string& name = out_->removes.emplace_back();
        if (IsStockMetadataName(text)) {
          name = text;
          return true;
        }
        return Path(text, &name);
      }
      case At::kPart:
        return key_ == "run_id" ? Id(text, &Target().part->run_id)
                                : Refuse("unexpected string");
      case At::kMetadata:
        Target().metadata.emplace_back(key_, text);
        return true;
      default:
        return Refuse("unexpected string");
    }
  }

  bool OnUnsigned(uint64_t value) override {
    if (at_ == At::kRoot && key_ == "version") {
      if (value != static_cast<uint64_t>(kManifestVersion)) {
        return Fail(Unsupported("version " + std::to_string(value) +
                                ": written by another torch_ckpt"));
      }
      versioned_ = true;
      return true;
    }
    if (at_ == At::kFile && key_ == "bytes") {
      Target().files.back().bytes = value;
      return true;
    }
    if (InManifest() && key_ == "world_size") {
      if (value == 0 || value > INT32_MAX) return Refuse("bad world_size");
      Target().world_size = static_cast<int64_t>(value);
      return true;
    }
    if (InManifest() && key_ == "segment_bytes") {
      if (value != kSegmentBytes)
        return Fail(Unsupported("digests over other segments than ours"));
      return true;
    }
    if (at_ == At::kPart) return PartNumber(value);
    return Refuse("unexpected number");
  }

  bool OnBeginObject() override {
    if (at_ == At::kStart) return Enter(At::kRoot);
    if (journal_ && at_ == At::kRoot && key_ == "manifest")
      return Enter(At::kManifest);
    if (at_ == At::kFiles) {
      Target().files.emplace_back();
      return Enter(At::kFile);
    }
    if (at_ == At::kRenames) {
      out_->renames.emplace_back();
      return Enter(At::kRename);
    }
    if (!journal_ && at_ == At::kRoot && key_ == "part") {
      Target().part.emplace();
      return Enter(At::kPart);
    }
    if (InManifest() && key_ == "metadata") {
      has_metadata_ = true;
      return Enter(At::kMetadata);
    }
    return Refuse("unexpected object");
  }

  // Twin keys are refused by ParseJson, unknown ones above: the count tells
  // whether all are there.
  bool OnEndObject() override {
    if (at_ == At::kMetadata) {
      at_ = journal_ ? At::kManifest : At::kRoot;
      return true;
    }
    size_t keys = KnownKeys().size();
    // These are optional.
    if (at_ == At::kRoot && !journal_ && !Target().part) --keys;
    if (InManifest() && !has_metadata_) --keys;
    if (seen_[static_cast<size_t>(at_)] != keys)
      return Refuse("a key is missing");
    switch (at_) {
      case At::kManifest:
      case At::kPart:
        at_ = At::kRoot;
        break;
      case At::kFile:
        at_ = At::kFiles;
        break;
      case At::kRename:
        at_ = At::kRenames;
        break;
      default:
        at_ = At::kStart;
    }
    return true;
  }

  bool OnBeginArray() override {
    if (InManifest() && key_ == "files") return Enter(At::kFiles);
    if (journal_ && at_ == At::kRoot && key_ == "renames")
      return Enter(At::kRenames);
    if (journal_ && at_ == At::kRoot && key_ == "removes")
      return Enter(At::kRemoves);
    return Refuse("unexpected array");
  }

  bool OnEndArray() override {
    at_ = at_ == At::kFiles && journal_ ? At::kManifest : At::kRoot;
    return true;
  }

 private:
  enum class At {
    kStart,
    kRoot,
    kManifest,
    kFiles,
    kFile,
    kRenames,
    kRename,
    kRemoves,
    kPart,
    kMetadata
  };
  static constexpr size_t kStates = 10;

  Manifest& Target() { return out_->manifest; }
  bool InManifest() const {
    return at_ == (journal_ ? At::kManifest : At::kRoot);
  }
  bool Enter(At at) {
    at_ = at;
    seen_[static_cast<size_t>(at)] = 0;
    return true;
  }

  std::span<const std::string_view> KnownKeys() const {
    static constexpr std::string_view kFileKeys[] = {
        "name", "id", "role", "bytes", "crc32c", "container"};
    static constexpr std::string_view kRenameKeys[] = {"from", "to"};
    static constexpr std::string_view kJournalKeys[] = {
        "format", "version", "manifest", "renames", "removes", "crc32c"};
    static constexpr std::string_view kAllKeys[] = {
        "format", "version",  "save_id", "world_size", "segment_bytes",
        "files",  "metadata", "crc32c",  "part"};
    static constexpr std::string_view kPartKeys[] = {"rank", "world_size",
                                                     "run_id", "sequence"};
    switch (at_) {
      case At::kFile:
        return kFileKeys;
      case At::kRename:
        return kRenameKeys;
      case At::kPart:
        return kPartKeys;
      case At::kManifest:
        return std::span(kAllKeys).subspan(2, 5);
      case At::kRoot:
        if (journal_) return kJournalKeys;
        return kAllKeys;
      default:
        return {};
    }
  }

  bool Id(std::string_view text, std::string* out) {
    if (!IsId(text)) return Refuse("an id is not 32 lower-case hex digits");
    *out = text;
    return true;
  }
  bool Path(std::string_view text, std::string* out) {
    return Checked(CheckFilePath(text), text, out);
  }
  bool Name(std::string_view text, std::string* out) {
    return Checked(CheckFileName(text), text, out);
  }
  bool Checked(Status status, std::string_view text, std::string* out) {
    if (!status.ok()) return Fail(std::move(status));
    *out = text;
    return true;
  }
  bool PartNumber(uint64_t value) {
    ManifestPart& part = *Target().part;
    if (key_ == "sequence") {
      part.sequence = value;
      return true;
    }
    if (value > INT32_MAX) return Refuse("bad rank or world_size of a part");
    if (key_ == "rank") {
      part.rank = static_cast<int64_t>(value);
      return true;
    }
    if (key_ != "world_size") return Refuse("unexpected number");
    part.world_size = static_cast<int64_t>(value);
    return true;
  }
  bool FileString(std::string_view text) {
    ManifestFile& file = Target().files.back();
    if (key_ == "name") return Path(text, &file.name);
    if (key_ == "id") return Id(text, &file.id);
    if (key_ == "role") {
      const auto role = RoleFromName(text);
      if (!role) return Refuse("unknown role of a file");
      file.role = *role;
      return true;
    }
    if (key_ == "container") {
      const auto kind =
          std::find(kContainerNames.begin(), kContainerNames.end(), text);
      if (kind == kContainerNames.end()) {
        return Fail(Unsupported("a file is a '" + std::string(text) +
                                "', which this torch_ckpt does not know"));
      }
      file.container = static_cast<Container>(kind - kContainerNames.begin());
      return true;
    }
    if (key_ != "crc32c") return Refuse("unexpected string");
    if (text.size() % kCrcDigits != 0)
      return Refuse("crc32c has no whole number of checksums");
    file.crc32c.reserve(text.size() / kCrcDigits);
    for (size_t i = 0; i < text.size(); i += kCrcDigits) {
      const auto crc = ParseHex(text.substr(i, kCrcDigits));
      if (!crc) return Refuse("crc32c is not lower-case hex");
      file.crc32c.push_back(static_cast<uint32_t>(*crc));
    }
    return true;
  }

  const bool journal_;
  Journal* out_;
  At at_ = At::kStart;
  std::string key_;
  size_t keys_ = 0;  // seen in the root
  bool versioned_ = false;
  bool has_metadata_ = false;
  std::array<size_t, kStates> seen_{};  // keys of the open object, by place
};

Status CheckFiles(const Manifest& manifest) {
  std::vector<std::string_view> names;
  int catalogs = 0, indexes = 0;
  for (const ManifestFile& file : manifest.files) {
    const uint64_t segments =
        file.bytes / kSegmentBytes + (file.bytes % kSegmentBytes != 0);
    if (file.crc32c.size() != segments) {
      return Corrupt("its " + std::to_string(file.bytes) + " bytes need " +
                     std::to_string(segments) + " checksums, not " +
                     std::to_string(file.crc32c.size()))
          .WithFile(file.name);
    }
    const std::string_view name = file.name;
    const std::string_view top = name.substr(0, name.find('/'));
    if (top == kManifestName || top == kJournalName || IsPartManifestName(top))
      return Corrupt("the name is reserved").WithFile(file.name);
    if (top != name && file.role == FileRole::kCatalog) {
      return Corrupt("a catalog lies in a subdirectory").WithFile(file.name);
    }
    if (file.container != ContainerOf(file.role))
      return Unsupported("its container is not that of its role")
          .WithFile(file.name);
    if (file.container == Container::kSafetensors &&
        !file.name.ends_with(kDataSuffix))
      return Corrupt("a data file is not *.safetensors").WithFile(file.name);
    catalogs += file.role == FileRole::kCatalog;
    indexes += file.role == FileRole::kIndex;
    names.push_back(file.name);
  }
  if (catalogs > 1 || indexes > 1)
    return Corrupt("more than one catalog or index");
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end())
    return Corrupt("named twice").WithFile(std::string(*twin));
  for (const std::string_view name : names) {
    for (size_t at = name.find('/'); at != name.npos;
         at = name.find('/', at + 1)) {
      if (std::binary_search(names.begin(), names.end(), name.substr(0, at))) {
        return Corrupt("lies in a directory that is named as a file")
            .WithFile(std::string(name));
      }
    }
  }
  return {};
}

Status CheckReplay(const Journal& journal) {
  std::vector<std::string_view> files, from, to, removes;
  for (const ManifestFile& file : journal.manifest.files)
    files.push_back(file.name);
  std::sort(files.begin(), files.end());
  const auto in_manifest = [&](std::string_view name) {
    return std::binary_search(files.begin(), files.end(), name);
  };
  for (const JournalRename& rename : journal.renames) {
    if (!in_manifest(rename.to)) {
      return Corrupt("is renamed to, but not in the manifest")
          .WithFile(rename.to);
    }
    from.push_back(rename.from);
    to.push_back(rename.to);
  }
  for (const std::string& name : journal.removes) {
    if (in_manifest(name) || name == kManifestName || name == kJournalName)
      return Corrupt("is removed, but needed").WithFile(name);
    removes.push_back(name);
  }
  for (const auto& names : {std::cref(from), std::cref(to), std::cref(removes)})
    if (const auto twin = FindDuplicate(names.get()))
      return Corrupt("named twice").WithFile(std::string(*twin));
  return {};
}

Status ParseDocument(ByteSpan bytes, bool journal, Journal* out) {
  if (bytes.size() > kMaxManifestBytes) return Unsupported("larger than 1 GiB");
  const std::string_view text = AsText(bytes);
  DocumentHandler handler(journal, out);
  Status parsed = ParseJson(text, kDepth, &handler);
  // What another version wrote is told from what was altered by the checksum. A
  // other one may have another last line, and stays another one.
  if (parsed.ok() ||
      (parsed.kind() == ErrorKind::kUnsupported && HasTail(text))) {
    TC_RETURN_IF_ERROR(CheckTail(text));
  }
  TC_RETURN_IF_ERROR(parsed);
  if (const auto& part = out->manifest.part;
      part && (part->rank >= part->world_size ||
               part->world_size != out->manifest.world_size)) {
    return Corrupt("its part is of no rank of its world");
  }
  return CheckFiles(out->manifest);
}

}  // namespace

Result<Manifest> ParseManifest(ByteSpan text) {
  Journal out;
  TC_RETURN_IF_ERROR(ParseDocument(text, /*journal=*/false, &out));
  return std::move(out.manifest);
}

Result<Journal> ParseJournal(ByteSpan text) {
  Journal out;
  TC_RETURN_IF_ERROR(ParseDocument(text, /*journal=*/true, &out));
  TC_RETURN_IF_ERROR(CheckReplay(out));
  return out;
}

}  // namespace torch_ckpt
