// From torch tensors and plan bytes to the engine's types.
//
// The plan of an op is a uint8 tensor that holds UTF-8 JSON: names and paths
// never cross as `str`, which costs a fresh copy and, up to torch 2.13, leaks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/write/source_tensor.h"
#include "json/fields.h"
#include "runtime/jobs.h"

namespace torch_ckpt::ops {

using torch::stable::Tensor;

// The report of every data op: int64, at least this many elements.
//   [0] 1 when the op has done its work, 0 otherwise
//   [1] bytes of data that were asked for
//   [2] bytes that went through the disk or the page cache
//   [3] bytes that were compared with a digest (read), files (write)
inline constexpr int64_t kReportSize = 4;

// The only throw of the extension: std::runtime_error with the text of the
// status, std::invalid_argument for a caller's mistake.
void ThrowIfError(const Status& status);

// The elements of a report, all set to 0.
Result<int64_t*> ReportOf(Tensor& report);

// What an op does under its plan's job; `report` has kReportSize elements.
using OpWork =
    std::function<Status(const Json& plan, Job* job, int64_t* report)>;

// Every op with a plan: `work` under the job that plan["job"] names, or a
// private one. Throws its error after keeping it in the job, where Python finds
// its parts. A wrong report, plan or number of a job is only thrown: there is
// no job yet.
void RunOp(const Tensor& plan, Tensor& report, const OpWork& work);

// Memory of a dense or strided CPU tensor. kUnsupported for other devices and
// for more than kMaxDims dimensions.
Result<SourceTensor> SourceOf(const Tensor& tensor);

// The same of a tensor to be written, which may be on a CUDA device.
Result<SourceTensor> WriteSourceOf(const Tensor& tensor);

// The ops. write_ops.cc:
void write(std::vector<Tensor> tensors, Tensor plan, Tensor report);
// stage_ops.cc:
void stage(std::vector<Tensor> tensors, Tensor plan, Tensor offsets,
           Tensor report);
std::vector<Tensor> views(Tensor region, std::vector<Tensor> like,
                          Tensor offsets);
// read_ops.cc:
void read(std::vector<Tensor> targets, Tensor plan, Tensor report);
void crc32c(Tensor data, Tensor report);

}  // namespace torch_ckpt::ops
