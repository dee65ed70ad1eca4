#include "engine/write/stored_inputs.h"

#include <algorithm>

#include "base/checked.h"
#include "plan/copy_run.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Below this a run is not worth a digest of its own.
constexpr uint64_t kMinStream = uint64_t{64} << 10;

// Its bytes lie in a row, and it copies each once.
bool DenseSource(const Run& run) {
  uint64_t span = run.bytes;
  for (size_t l = static_cast<size_t>(run.loops); l > 0; --l) {
    if (static_cast<uint64_t>(run.src_stride[l - 1]) != span) return false;
    span *= static_cast<uint64_t>(run.count[l - 1]);
  }
  return true;
}

void CopyInto(const Run& run, const std::byte* bytes, uint64_t origin,
              FillBuffer* buffer) {
  CopyRun(run, bytes, origin, buffer->Out(0, 0).data(), 0);
  buffer->Filled(run.TotalBytes());
}

}  // namespace

StoredInputs::StoredInputs(std::shared_ptr<OpenFiles> files, bool verify,
                           int workers)
    : files_(std::move(files)),
      read_(files_->set().files().size()),
      digests_(workers, DigestsOf(files_->set(), verify)) {}

Result<std::shared_ptr<const ByteSource>> StoredInputs::Open(uint32_t file) {
  read_[file] = true;
  return files_->Get(file);
}

Status StoredInputs::Read(std::vector<StoredRun>* runs, MutableByteSpan scratch,
                          FillBuffer* buffer) {
  std::sort(runs->begin(), runs->end(),
            [](const StoredRun& a, const StoredRun& b) {
              return a.file != b.file ? a.file < b.file : a.run.src < b.run.src;
            });
  for (size_t i = 0; i < runs->size();) {
    const StoredRun& first = (*runs)[i];
    size_t last = i + 1;
    uint64_t hi = first.run.src + first.run.SrcSpan();
    if (DenseSource(first.run)) {
      while (last < runs->size() && (*runs)[last].file == first.file &&
             (*runs)[last].run.src == hi && DenseSource((*runs)[last].run) &&
             hi + (*runs)[last].run.SrcSpan() - first.run.src <= kFetchBytes) {
        hi += (*runs)[last].run.SrcSpan();
        ++last;
      }
    }
    const bool alone =
        last - i == 1 && first.run.loops == 0 && first.run.bytes >= kMinStream;
    TC_RETURN_IF_ERROR(files_->set().Explain(
        alone ? Stream(first, scratch, buffer)
              : Fetch(&first, last - i, hi, scratch, buffer)));
    i = last;
  }
  return {};
}

Status StoredInputs::Stream(const StoredRun& stored, MutableByteSpan scratch,
                            FillBuffer* buffer) {
  const Run& run = stored.run;
  TC_ASSIGN_OR_RETURN(const auto source, Open(stored.file));
  const uint64_t end = run.src + run.bytes;
  StepReader steps(*source, end, scratch);
  for (uint64_t at = run.src; at < end;) {
    const uint64_t dst = run.dst + (at - run.src);
    const uint64_t segment = RoundDown(at, kSegmentBytes) + kSegmentBytes;
    const uint64_t size =
        std::min({uint64_t{kDigestStep}, end - at, segment - at,
                  buffer->SegmentEnd(dst) - dst});
    TC_ASSIGN_OR_RETURN(const std::byte* bytes, steps.Next(at, size));
    const uint32_t crc = buffer->CopyAndDigest(dst, {bytes, size});
    if (digests_.kind() == DigestKind::kSegments) {
      digests_.Add(buffer->worker(), stored.file, at, crc, size);
    } else {
      digests_.Add(buffer->worker(), stored.file, at, bytes, size);
    }
    at += size;
  }
  return {};
}

Status StoredInputs::Fetch(const StoredRun* group, size_t count, uint64_t hi,
                           MutableByteSpan scratch, FillBuffer* buffer) {
  const uint32_t file = group->file;
  const uint64_t lo = group->run.src;
  const int worker = buffer->worker();
  TC_ASSIGN_OR_RETURN(const auto source, Open(file));
  if (count == 1 && group->run.loops == 0) {
    const MutableByteSpan into = buffer->Out(group->run.dst, hi - lo);
    TC_ASSIGN_OR_RETURN(const uint64_t cached, source->ReadCached(into, lo));
    if (cached == hi - lo) {
      digests_.Add(worker, file, lo, into.data(), hi - lo);
      buffer->Filled(hi - lo);
      return {};
    }
  }
  if (hi - lo > kFetchBytes) {
    digests_.Touch(worker, file, lo, hi);
    return FetchWindows(*source, group->run, scratch, buffer);
  }
  TC_ASSIGN_OR_RETURN(const std::byte* bytes, source->Read(lo, hi, scratch));
  if (count > 1 || DenseSource(group->run)) {
    digests_.Add(worker, file, lo, bytes, hi - lo);
  } else {
    digests_.Touch(worker, file, lo, hi);
  }
  for (size_t i = 0; i < count; ++i) CopyInto(group[i].run, bytes, lo, buffer);
  return {};
}

Status StoredInputs::FetchWindows(const ByteSource& source, const Run& run,
                                  MutableByteSpan scratch, FillBuffer* buffer) {
  Status status;
  SplitBySrcSpan(run, kFetchBytes, [&](const Run& part) {
    if (!status.ok()) return;
    const auto bytes =
        source.Read(part.src, part.src + part.SrcSpan(), scratch);
    if (bytes.ok()) CopyInto(part, *bytes, part.src, buffer);
    status = bytes.status();
  });
  return status;
}

Status StoredInputs::Check(Job* job) {
  std::vector<uint32_t> read;
  for (uint32_t f = 0; f < read_.size(); ++f) {
    if (read_[f]) read.push_back(f);
  }
  TC_RETURN_IF_ERROR(files_->set().CheckUnchanged(read));
  const FileSet& set = files_->set();
  if (set.has_digests() && digests_.kind() == DigestKind::kNone) {
    return set.CheckCurrent();  // which digests would have told
  }
  return digests_.Check(files_.get(), Untiled::kReadAgain, job);
}

}  // namespace torch_ckpt
