#include "format/ours/manifest.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <span>

#include "format/json.h"
#include "format/ours/manifest_text.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

using internal::kContainerNames;

// In the order of the enum.
constexpr std::array<std::string_view, 5> kRoleNames = {
    "data", "objects", "catalog", "index", "extra"};

void AppendTail(std::string* out) {
  const uint32_t crc = Crc32c(0, out->data(), out->size());
  *out += internal::kTailStart;
  AppendHex(out, crc, 8);
  *out += internal::kTailEnd;
}

void AppendHead(std::string* out, std::string_view format) {
  *out += "{\n\"format\": \"";
  *out += format;
  *out += "\",\n\"version\": ";
  AppendUnsigned(out, static_cast<uint64_t>(kManifestVersion));
  *out += ",\n";
}

void AppendPart(std::string* out, const ManifestPart& part) {
  *out += ",\n\"part\": {\"rank\": ";
  AppendUnsigned(out, static_cast<uint64_t>(part.rank));
  *out += ", \"world_size\": ";
  AppendUnsigned(out, static_cast<uint64_t>(part.world_size));
  *out += ", \"run_id\": ";
  AppendJsonString(out, part.run_id);
  *out += ", \"sequence\": ";
  AppendUnsigned(out, part.sequence);
  *out += '}';
}

// The keys of a manifest that a journal holds too, without braces and without
// a last comma.
void AppendManifest(std::string* out, const Manifest& manifest) {
  *out += "\"save_id\": ";
  AppendJsonString(out, manifest.save_id);
  *out += ",\n\"world_size\": ";
  AppendUnsigned(out, static_cast<uint64_t>(manifest.world_size));
  *out += ",\n\"segment_bytes\": ";
  AppendUnsigned(out, kSegmentBytes);
  *out += ",\n\"files\": [";
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    *out += i ? ",\n{\"name\": " : "\n{\"name\": ";
    AppendJsonString(out, file.name);
    *out += ", \"id\": ";
    AppendJsonString(out, file.id);
    *out += ", \"role\": ";
    AppendJsonString(out, RoleName(file.role));
    *out += ", \"container\": ";
    AppendJsonString(out, kContainerNames[static_cast<size_t>(file.container)]);
    *out += ", \"bytes\": ";
    AppendUnsigned(out, file.bytes);
    *out += ", \"crc32c\": \"";
    for (uint32_t crc : file.crc32c) AppendHex(out, crc, 8);
    *out += "\"}";
  }
  *out += "\n]";
  if (manifest.metadata.empty()) return;
  *out += ",\n\"metadata\": {";
  for (size_t i = 0; i < manifest.metadata.size(); ++i) {
    *out += i ? ",\n" : "\n";
    AppendJsonString(out, manifest.metadata[i].first);
    *out += ": ";
    AppendJsonString(out, manifest.metadata[i].second);
  }
  *out += "\n}";
}

}  // namespace

std::string_view RoleName(FileRole role) {
  return kRoleNames[static_cast<size_t>(role)];
}

std::optional<FileRole> RoleFromName(std::string_view name) {
  const auto role = std::find(kRoleNames.begin(), kRoleNames.end(), name);
  if (role == kRoleNames.end()) return std::nullopt;
  return static_cast<FileRole>(role - kRoleNames.begin());
}

Status CheckSegment(const ManifestFile& file, uint64_t begin, uint32_t crc32c) {
  if (crc32c == file.crc32c[begin / kSegmentBytes]) return {};
  return Corrupt(
      "bytes " + std::to_string(begin) + " to " +
      std::to_string(std::min(begin + kSegmentBytes, file.bytes)) +
      " do not match their CRC-32C: the file was altered or the disk returned "
      "wrong data");
}

Status CheckSegments(const ManifestFile& file, uint64_t begin, ByteSpan bytes) {
  for (uint64_t at = 0; at < bytes.size(); at += kSegmentBytes) {
    const uint64_t size = std::min<uint64_t>(kSegmentBytes, bytes.size() - at);
    TC_RETURN_IF_ERROR(
        CheckSegment(file, begin + at, Crc32c(0, bytes.data() + at, size)));
  }
  return {};
}

FilesByName::FilesByName(std::span<const ManifestFile> files)
    : files_(files), sorted_(files.size()) {
  std::iota(sorted_.begin(), sorted_.end(), 0u);
  std::sort(sorted_.begin(), sorted_.end(), [&](uint32_t a, uint32_t b) {
    return files_[a].name < files_[b].name;
  });
}

int64_t FilesByName::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      sorted_.begin(), sorted_.end(), name,
      [&](uint32_t f, std::string_view n) { return files_[f].name < n; });
  if (at == sorted_.end() || files_[*at].name != name) return -1;
  return static_cast<int64_t>(*at);
}

std::string EncodeManifest(const Manifest& manifest) {
  std::string out;
  AppendHead(&out, internal::kManifestFormat);
  AppendManifest(&out, manifest);
  if (manifest.part) AppendPart(&out, *manifest.part);
  out += ",\n";
  AppendTail(&out);
  return out;
}

std::string EncodeJournal(const Journal& journal) {
  std::string out;
  AppendHead(&out, internal::kJournalFormat);
  out += "\"manifest\": {\n";
  AppendManifest(&out, journal.manifest);
  out += "\n},\n\"renames\": [";
  for (size_t i = 0; i < journal.renames.size(); ++i) {
    out += i ? ",\n{\"from\": " : "\n{\"from\": ";
    AppendJsonString(&out, journal.renames[i].from);
    out += ", \"to\": ";
    AppendJsonString(&out, journal.renames[i].to);
    out += '}';
  }
  out += "\n],\n\"removes\": [";
  for (size_t i = 0; i < journal.removes.size(); ++i) {
    out += i ? ",\n" : "\n";
    AppendJsonString(&out, journal.removes[i]);
  }
  out += "\n],\n";
  AppendTail(&out);
  return out;
}

}  // namespace torch_ckpt
