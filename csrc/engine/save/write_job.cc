#include "engine/save/write_job.h"

#include <algorithm>

#include "engine/commit/staging.h"
#include "engine/open/header_io.h"
#include "engine/save/data_layout.h"
#include "format/names.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kSpillName = "spill";

// The short headers of the files of this job: gone again unless it is done.
class StagedHeaders {
 public:
  explicit StagedHeaders(const Directory& staging) : staging_(staging) {}
  StagedHeaders(const StagedHeaders&) = delete;
  StagedHeaders& operator=(const StagedHeaders&) = delete;
  ~StagedHeaders() {
    for (const std::string& staged : staged_) UnstageHeader(staging_, staged);
  }

  Status Stage(const std::string& staged, const FileHeader& file,
               std::string_view text) {
    staged_.push_back(staged);
    return StageHeader(staging_, staged, file, text);
  }
  void Keep() { staged_.clear(); }

 private:
  const Directory& staging_;
  std::vector<std::string> staged_;
};

// One call of RunWriteJob.
class WriteJob {
 public:
  WriteJob(WritePlan plan, const std::vector<SourceTensor>& sources,
           Directory staging, MemorySources memory, int workers, Job* job)
      : plan_(std::move(plan)),
        sources_(sources),
        staging_(std::move(staging)),
        memory_(std::move(memory)),
        workers_(workers),
        job_(job),
        headers_(staging_) {}

  // The files of this rank alone.
  Status LayOutFiles() {
    for (WriteFile& file : plan_.files) {
      TC_RETURN_IF_ERROR(CheckFilePath(file.name));
      TC_RETURN_IF_ERROR(LayOut(file).WithFile(file.name));
    }
    return {};
  }

  // What this rank writes of the final files, and what it leaves for others.
  Status LayOutFinals() {
    if (plan_.final_tensors.empty()) return {};
    for (const WriteTensor& tensor : plan_.final_tensors) {
      TC_RETURN_IF_ERROR(CheckSource(tensor, sources_));
    }
    TC_ASSIGN_OR_RETURN(finals_, PlanFinalWrite(staging_, plan_.final_tensors,
                                                &memory_, {plan_.rank, job_}));
    for (Output& file : finals_.files) outputs_.push_back(std::move(file));
    if (finals_.spill.size() == 0) return {};
    AddOutput(std::string(kSpillName), FileRole::kExtra, NewId(),
              std::move(finals_.spill));
    return {};
  }

  Status Write() {
    Status status = WriteAndSend();
    if (status.ok()) status = memory_.CheckCasts();
    if (status.ok()) return {};
    // Some are written all the same.
    for (const Output& output : outputs_) {
      if (output.ranges) continue;
      (void)staging_.Unlink(output.file.staged, true);
    }
    return status;
  }

  WrittenPlan Report() {
    WrittenPlan report;
    if (finals_.ring) report.ring_bytes = finals_.ring->own_bytes();
    for (size_t f = 0; f < outputs_.size(); ++f) {
      StagedFile& file = outputs_[f].file;
      const size_t of_final = f - plan_.files.size();
      if (f < plan_.files.size()) {
        file.crc32c = std::move(written_[f][0].crc32c);
        report.files.push_back(std::move(file));
      } else if (of_final < finals_.files.size()) {
        report.final_files.push_back(
            {static_cast<uint32_t>(of_final), file.id, std::move(written_[f])});
      } else {
        file.crc32c = std::move(written_[f][0].crc32c);
        report.spill =
            WrittenSpill{std::move(file), std::move(finals_.spill_bytes),
                         std::move(finals_.spill_boxes)};
      }
    }
    headers_.Keep();
    return report;
  }

 private:
  Status WriteAndSend() {
    const bool leads = finals_.ring && finals_.ring->leads();
    OutputOptions options = plan_.options;
    // The leader of a ring spends as long on a piece of what many ranks have as
    // on writing it.
    if (leads) options.workers = 2 * workers_;
    const auto write = [&](int first_worker) -> Status {
      TC_ASSIGN_OR_RETURN(written_, WriteOutputs(staging_, outputs_, options,
                                                 job_, first_worker));
      return {};
    };
    if (!finals_.ring || leads) return write(0);
    // The leader has as much to write as all members send it: this rank's own
    // bytes do not wait for that.
    return ForEachItem(2, 2, nullptr, [&](int64_t item, int) {
      return item == 0 ? finals_.ring->Send(workers_, job_) : write(workers_);
    });
  }

  Status LayOut(WriteFile& file) {
    const std::string id = NewId();
    if (file.role == FileRole::kData) {
      TC_ASSIGN_OR_RETURN(DataLayout layout,
                          LayOutData(&file.tensors, id, sources_, &memory_,
                                     plan_.join ? &joined_ : nullptr, &texts_));
      TC_RETURN_IF_ERROR(headers_.Stage(StagedName(file.name, id),
                                        layout.parsed, layout.header));
      AddOutput(file.name, file.role, id, std::move(layout.extents));
      return {};
    }
    ExtentList extents;
    for (const size_t source : file.raw) {
      if (source >= sources_.size()) return InvalidArgument("has no source");
      extents.Append(memory_.Of(source), sources_[source].bytes());
    }
    AddOutput(file.name, file.role, id, std::move(extents));
    return {};
  }

  void AddOutput(const std::string& name, FileRole role, const std::string& id,
                 ExtentList extents) {
    const uint64_t bytes = extents.size();
    outputs_.push_back({ToBeStaged(name, id, role, bytes), std::move(extents)});
  }

  WritePlan plan_;
  const std::vector<SourceTensor>& sources_;
  const Directory staging_;
  MemorySources memory_;
  JoinedBoxes joined_;
  Texts texts_;
  const int workers_;
  Job* const job_;
  StagedHeaders headers_;
  FinalWrite finals_;
  std::vector<Output> outputs_;  // of files, then final ones, then the spill
  std::vector<std::vector<WrittenRange>> written_;
};

}  // namespace

Result<WrittenPlan> RunWriteJob(WritePlan plan,
                                const std::vector<SourceTensor>& sources,
                                Job* job) {
  const std::string path = plan.staging;
  const auto run = [&]() -> Result<WrittenPlan> {
    TC_ASSIGN_OR_RETURN(Directory staging, Directory::Open(path));
    const int workers = std::max(1, plan.options.workers);
    // Sending to a ring and writing go on at once.
    TC_ASSIGN_OR_RETURN(MemorySources memory,
                        MemorySources::Make(sources, nullptr, 2 * workers));
    WriteJob write(std::move(plan), sources, std::move(staging),
                   std::move(memory), workers, job);
    TC_RETURN_IF_ERROR(write.LayOutFiles());
    TC_RETURN_IF_ERROR(write.LayOutFinals());
    TC_RETURN_IF_ERROR(write.Write());
    return write.Report();
  };
  Result<WrittenPlan> written = run();
  if (written.ok()) return written;
  return ExplainGone(written.status(), path);
}

}  // namespace torch_ckpt
