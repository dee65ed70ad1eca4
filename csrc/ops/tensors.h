// From torch tensors and plan bytes to the engine's types.
//
// The plan of an op is a uint8 tensor that holds UTF-8 JSON: names and paths
// never cross as `str`, which costs a fresh copy and, up to torch 2.13, leaks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/write/source_tensor.h"
#include "format/dtype.h"
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

// Hands `text` to torch as a warning: to standard error, or to what the program
// has set for them.
void Warn(const std::string& text);

// The elements of a report, all set to 0.
Result<int64_t*> ReportOf(Tensor& report);

// What an op does under its plan's job; `report` has kReportSize elements.
using OpWork =
    std::function<Status(const Json& plan, Job* job, int64_t* report)>;

// The plan of op `op`, which has `fields` and no others; kInvalidArgument names
// the key that is wrong. Every op with a plan begins here, which refuses to run
// in a forked child.
Result<Json> ParsePlan(const char* op, std::span<const Field> fields,
                       const Tensor& plan);

// Every op with a plan and a report: `work` under the job that plan["job"]
// names, or a private one. Throws its error after keeping it in the job, where
// Python finds its parts. A wrong report, plan or number of a job is only
// thrown: there is no job yet.
void RunOp(const char* op, std::span<const Field> fields, const Tensor& plan,
           Tensor& report, const OpWork& work);

// The checkpoint that a plan names, by its number or its path, but not by both.
Result<std::shared_ptr<const Checkpoint>> CheckpointNamedBy(const Json& plan);

// The names in plan["names"], one for each of `count` tensors.
Result<std::vector<std::string>> NamesOfEach(const Json& plan, size_t count);

// Memory of a dense or strided CPU tensor. kUnsupported for other devices and
// for more than kMaxDims dimensions; `what` is what the tensor is, in words.
Result<SourceTensor> SourceOf(const Tensor& tensor,
                              const char* what = "a tensor");

// The same of a tensor to be written, which may be on a CUDA device.
Result<SourceTensor> WriteSourceOf(const Tensor& tensor);

// The dtype of a tensor's elements; nullopt where safetensors has none for it.
std::optional<Dtype> DtypeOf(const Tensor& tensor);

// A tensor's sizes as a header counts them: elements of less than a byte
// singly, where torch packs them. kUnsupported for packed ones of no dimension.
Result<Dims> ShapeInHeader(const Dims& sizes, Dtype dtype);

// A new uint8 tensor in host memory.
Tensor BytesTensor(const std::string& bytes);

// A `str` argument, which the kernel owns; as std::string TORCH_BOX would leak
// it, up to torch 2.13.
using Text = StringHandle;
// Its content; `text` is deleted.
std::string Take(Text text);

// Names, dtypes and shapes.
using Listing = std::tuple<std::vector<std::string>, std::vector<std::string>,
                           std::vector<std::vector<int64_t>>>;

// The ops. save_ops.cc:
void save(std::vector<Tensor> tensors, Tensor plan, Tensor report);
// describe_ops.cc:
Listing describe(Tensor plan);
Tensor plan(Text path, std::vector<Text> names, Text more);
// write_ops.cc:
void write(std::vector<Tensor> tensors, Tensor plan, Tensor report);
// stage_ops.cc:
void stage(std::vector<Tensor> tensors, Tensor plan, Tensor offsets,
           Tensor report, std::optional<Tensor> region);
std::vector<Tensor> views(Tensor region, std::vector<Tensor> like,
                          Tensor offsets);
// read_ops.cc:
void read(std::vector<Tensor> targets, Tensor plan, Tensor report);
void crc32c(Tensor data, Tensor report);
// Of each tensor the CRC-32C of its bytes in row-major order; -1 where it has
// no host memory.
void digests(std::vector<Tensor> tensors, Tensor digests);

}  // namespace torch_ckpt::ops
