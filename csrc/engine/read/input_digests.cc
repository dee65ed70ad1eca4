#include "engine/read/input_digests.h"

#include <algorithm>

#include "base/checked.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {

void InputDigests::Add(int worker, uint32_t file, uint64_t offset,
                       const std::byte* data, uint64_t size) {
  while (size > 0) {
    const uint64_t cut = RoundDown(offset, kSegmentBytes) + kSegmentBytes;
    const uint64_t length = std::min(size, cut - offset);
    Add(worker, file, offset, Crc32c(0, data, length), length);
    data += length;
    offset += length;
    size -= length;
  }
}

void InputDigests::Add(int worker, uint32_t file, uint64_t offset, uint32_t crc,
                       uint64_t size) {
  std::vector<Digest>& digests = digests_[static_cast<size_t>(worker)];
  // Runs mostly continue where the last one ended.
  if (!digests.empty() && digests.back().file == file &&
      digests.back().offset + digests.back().size == offset &&
      offset % kSegmentBytes != 0) {
    Digest& last = digests.back();
    last.crc = Crc32cCombine(last.crc, crc, size);
    last.size += size;
  } else {
    digests.push_back({file, crc, offset, size});
  }
}

void InputDigests::Touch(int worker, uint32_t file, uint64_t lo, uint64_t hi) {
  // An empty one marks the segment; it never completes a tiling.
  for (uint64_t at = RoundDown(lo, kSegmentBytes); at < hi;
       at += kSegmentBytes) {
    digests_[static_cast<size_t>(worker)].push_back({file, 0, at, 0});
  }
}

Status InputDigests::Check(OpenFiles* files, const Job* job) {
  const FileSet& set = files->set();
  if (!set.has_digests()) return {};
  std::vector<Digest> digests;
  for (std::vector<Digest>& of_worker : digests_) {
    digests.insert(digests.end(), of_worker.begin(), of_worker.end());
    of_worker.clear();
  }
  std::sort(digests.begin(), digests.end(),
            [](const Digest& a, const Digest& b) {
              return a.file != b.file ? a.file < b.file : a.offset < b.offset;
            });
  ArenaLease scratch;
  for (size_t i = 0; i < digests.size();) {
    const uint32_t file = digests[i].file;
    const ManifestFile& named = set.files()[file];
    const uint64_t begin = RoundDown(digests[i].offset, kSegmentBytes);
    const uint64_t end = std::min(begin + kSegmentBytes, named.bytes);
    uint32_t crc = 0;
    uint64_t at = begin;
    bool tiled = true;
    for (; i < digests.size() && digests[i].file == file &&
           digests[i].offset < end;
         ++i) {
      tiled = tiled && digests[i].offset == at;
      crc = Crc32cCombine(crc, digests[i].crc, digests[i].size);
      at = digests[i].offset + digests[i].size;
    }
    if (!tiled || at != end) {
      if (job->cancelled()) return Cancelled("the job was cancelled");
      if (!scratch) {
        TC_ASSIGN_OR_RETURN(
            scratch, LeaseBuffer(kSegmentBytes + ByteSource::kSlack, job));
      }
      TC_ASSIGN_OR_RETURN(const auto source, files->Get(file));
      TC_ASSIGN_OR_RETURN(const std::byte* bytes,
                          source->Read(begin, end, scratch.span()));
      crc = Crc32c(0, bytes, end - begin);
    }
    if (crc != named.crc32c[begin / kSegmentBytes]) {
      return set.Explain(Corrupt("bytes " + std::to_string(begin) + " to " +
                                 std::to_string(end) +
                                 " do not match their CRC-32C")
                             .WithFile(set.path() + "/" + named.name));
    }
  }
  return {};
}

}  // namespace torch_ckpt
