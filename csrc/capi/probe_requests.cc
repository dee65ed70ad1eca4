// The request about what a directory and this machine can do for saves.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "capi/requests.h"
#include "json/held.h"
#include "os/byte_sink.h"
#include "os/byte_source.h"
#include "os/machine.h"
#include "os/probe.h"
#include "os/random.h"
#include "os/trial_directory.h"
#include "os/trials.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/cuda_driver.h"
#include "runtime/workers.h"

namespace torch_ckpt::capi {
namespace {

constexpr uint64_t kPiece = uint64_t{4} << 20;  // as jobs transfer
constexpr int kWorkers = 12;                    // as dcp/node.py has
constexpr const char* kFile = "speed";

// A finding, or the error instead: one that fails hides no other.
template <class T, class Fn>
Json Found(const Result<T>& result, Fn json) {
  return result.ok() ? Json(json(*result)) : ErrorJson(result.status());
}

Json SpaceJson(const Result<Space>& space) {
  return Found(space, [](const Space& found) {
    return Json{{"total", found.total}, {"available", found.available}};
  });
}

double Since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

// What no file system compresses.
void FillPiece(MutableByteSpan piece) {
  constexpr size_t kAtOnce = 256;
  for (size_t at = 0; at < piece.size(); at += kAtOnce) {
    FillRandom(piece.subspan(at, kAtOnce));
  }
}

// Each block says where it is, so that no file system stores equal ones once.
void Stamp(MutableByteSpan piece, uint64_t offset) {
  constexpr size_t kBlock = 4096;
  for (size_t at = 0; at < piece.size(); at += kBlock) {
    const uint64_t place = offset + at;
    std::memcpy(piece.data() + at, &place, sizeof place);
  }
}

// Seconds in which pieces of a file are written, and are durable.
Result<double> TimeWrite(ByteSink* sink, int64_t pieces, Job* job) {
  std::array<ArenaLease, kWorkers> leases;
  for (ArenaLease& lease : leases) {
    TC_ASSIGN_OR_RETURN(lease, LeaseBuffer(kPiece, job));
    FillPiece(lease.span().first(kPiece));
  }
  const auto begin = std::chrono::steady_clock::now();
  TC_RETURN_IF_ERROR(ForEachItem(
      kWorkers, pieces, job, [&](int64_t item, int worker) -> Status {
        const uint64_t at = static_cast<uint64_t>(item) * kPiece;
        const MutableByteSpan piece =
            leases[static_cast<size_t>(worker)].span().first(kPiece);
        Stamp(piece, at);
        job->AddDone(kPiece);
        return sink->Write(piece, at);
      }));
  TC_RETURN_IF_ERROR(sink->Close(/*sync=*/true));
  return Since(begin);
}

Result<double> TimeRead(const ByteSource& source, int64_t pieces, Job* job) {
  std::array<ArenaLease, kWorkers> leases;
  for (ArenaLease& lease : leases) {
    TC_ASSIGN_OR_RETURN(lease, LeaseBuffer(kPiece, job));
  }
  const auto begin = std::chrono::steady_clock::now();
  TC_RETURN_IF_ERROR(ForEachItem(
      kWorkers, pieces, job, [&](int64_t item, int worker) -> Status {
        const uint64_t at = static_cast<uint64_t>(item) * kPiece;
        job->AddDone(kPiece);
        return source
            .Read(at, at + kPiece, leases[static_cast<size_t>(worker)].span())
            .status();
      }));
  return Since(begin);
}

// Writes a file as saves do, and reads it as loads do. It loses its name
// before it has a size, so that not even a kill leaves it.
Result<Json> MeasureSpeed(const Directory& directory, uint64_t bytes,
                          Job* job) {
  const auto pieces = static_cast<int64_t>(bytes / kPiece);
  bytes = static_cast<uint64_t>(pieces) * kPiece;
  job->AddTotal(2 * bytes);
  TC_ASSIGN_OR_RETURN(
      File file,
      directory.OpenFile(kFile, {.write = true, .create_new = true}));
  TC_ASSIGN_OR_RETURN(const auto sink, ByteSink::Open(directory, kFile, bytes,
                                                      /*direct_io=*/true));
  TC_RETURN_IF_ERROR(directory.Unlink(kFile, /*missing_ok=*/false));
  TC_ASSIGN_OR_RETURN(const bool reserved, file.Allocate(bytes));
  if (!reserved) TC_RETURN_IF_ERROR(file.Truncate(bytes));
  TC_ASSIGN_OR_RETURN(const double write_s, TimeWrite(sink.get(), pieces, job));
  file.DropCached();
  const ByteSource source(std::move(file), bytes, /*direct_io=*/true);
  TC_ASSIGN_OR_RETURN(const double read_s, TimeRead(source, pieces, job));
  return Json{{"bytes", bytes}, {"write_s", write_s}, {"read_s", read_s}};
}

void TryAll(const TrialDirectory& own, uint64_t bytes, Job* job, Json* out) {
  const Directory& directory = own.directory();
  const auto works = [](bool found) { return Json{{"works", found}}; };
  const Status writes = ProbeWrites(directory);
  (*out)["writes"] = writes.ok() ? works(true) : ErrorJson(writes);
  (*out)["direct_io"] =
      Found(TryDirectIo(directory), [](const DirectIoTrial& found) {
        return Json{{"works", found.works},
                    {"offset_unit", found.offset_unit},
                    {"memory_unit", found.memory_unit}};
      });
  (*out)["allocate"] = Found(TryAllocate(directory), works);
  (*out)["no_replace"] = Found(TryNoReplace(directory), works);
  const Result<LockTrial> lock =
      own.lock().ok() ? TryLock(*own.lock()) : own.lock().status();
  (*out)["lock"] = Found(lock, [](const LockTrial& found) {
    return Json{{"excludes", found.excludes}, {"by_file", found.by_file}};
  });
  (*out)["sync"] = Found(TimeSync(directory), [](double seconds) {
    return Json{{"seconds", seconds}};
  });
  const Result<Space> space = SpaceOf(directory);
  if (bytes != 0) bytes = std::max(bytes, kPiece);
  // Some mounts do not say what room they have.
  if (space.ok() && space->total != 0) {
    bytes = std::min(bytes, space->available / 2);
  }
  (*out)["speed"] = bytes < kPiece
                        ? Json(nullptr)
                        : Found(
                              MeasureSpeed(directory, bytes, job),
                              [](const Json& found) { return found; });
}

Result<Json> ProbeDirectory(const std::string& path, uint64_t bytes, Job* job) {
  TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(path));
  TC_ASSIGN_OR_RETURN(const std::string kind, FileSystemName(directory));
  Json out = {{"file_system", kind},
              {"shared", IsShared(directory)},
              {"space", SpaceJson(SpaceOf(directory))}};
  Result<TrialDirectory> own = TrialDirectory::Make(directory);
  if (!own.ok()) {
    out["writes"] = ErrorJson(own.status());
    return out;
  }
  TryAll(*own, bytes, job, &out);
  const Status gone = own->Remove();
  if (job->cancelled()) return Cancelled("the job was cancelled");
  TC_RETURN_IF_ERROR(gone);
  return out;
}

Json OptionalJson(std::optional<uint64_t> value) {
  return value ? Json(*value) : Json(nullptr);
}

Json MachineJson() {
  const Result<Directory> shared = Directory::Open("/dev/shm");
  const Result<const CudaDriver*> cuda = CudaDriver::Process();
  return {{"cpus", UsableCpus()},
          {"crc32c", Crc32cImplementation()},
          {"open_files", OptionalJson(OpenFilesLimit())},
          {"locked_memory", OptionalJson(LockedMemoryLimit())},
          {"huge_pages", HugePagesOfMemory()},
          {"shared_huge_pages", HugePagesOfSharedMemory()},
          {"shared_memory",
           SpaceJson(shared.ok() ? SpaceOf(*shared) : shared.status())},
          {"cuda", cuda.ok() ? Json::object() : ErrorJson(cuda.status())}};
}

}  // namespace

Result<Json> ProbeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const int64_t bytes, GetInt(request, "bytes"));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(
      Json directory,
      ProbeDirectory(path, static_cast<uint64_t>(std::max<int64_t>(bytes, 0)),
                     job.get()));
  return Json{{"directory", std::move(directory)}, {"machine", MachineJson()}};
}

}  // namespace torch_ckpt::capi
