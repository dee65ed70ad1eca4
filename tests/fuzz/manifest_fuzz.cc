// The manifest and the journal. The checksum in the last line is put right
// first, or nothing would get past it.
#include <cstdio>
#include <cstdlib>

#include "format/names.h"
#include "format/ours/manifest.h"
#include "runtime/crc32c.h"

using namespace torch_ckpt;

namespace {

std::string Resealed(std::string text) {
  constexpr size_t kTail = 23;  // "crc32c": "........"\n}\n
  if (text.size() < kTail) return text;
  const size_t body = text.size() - kTail;
  char tail[kTail + 1];
  std::snprintf(tail, sizeof tail, "\"crc32c\": \"%08x\"\n}\n",
                Crc32c(0, text.data(), body));
  return text.replace(body, kTail, tail);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text =
      Resealed(std::string(reinterpret_cast<const char*>(data), size));
  const auto manifest = ParseManifest(AsBytes(text));
  if (manifest.ok()) {
    for (const ManifestFile& file : manifest->files) {
      if (!CheckFilePath(file.name).ok() || !IsId(file.id)) abort();
    }
    const std::string again = EncodeManifest(*manifest);
    if (!ParseManifest(AsBytes(again)).ok()) abort();
  }
  const auto journal = ParseJournal(AsBytes(text));
  if (journal.ok()) {
    for (const JournalRename& rename : journal->renames) {
      if (!CheckFileName(rename.from).ok() || !CheckFilePath(rename.to).ok())
        abort();
    }
    const std::string again = EncodeJournal(*journal);
    if (!ParseJournal(AsBytes(again)).ok()) abort();
  }
  return 0;
}
