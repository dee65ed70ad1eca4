// Requests about the values of tensors.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "capi/requests.h"
#include "engine/read/value_jobs.h"
#include "json/held.h"

namespace torch_ckpt::capi {
namespace {

Result<StreamOptions> OptionsOf(const Json& request) {
  StreamOptions options;
  TC_ASSIGN_OR_RETURN(const int64_t workers,
                      GetInt(request, "workers", options.workers));
  TC_ASSIGN_OR_RETURN(
      const int64_t memory,
      GetInt(request, "memory", static_cast<int64_t>(options.memory)));
  options.workers = static_cast<int>(std::clamp<int64_t>(workers, 1, 256));
  options.memory = static_cast<uint64_t>(std::max<int64_t>(0, memory));
  options.verify = GetBool(request, "verify", options.verify);
  options.direct_io = GetBool(request, "direct_io", options.direct_io);
  return options;
}

Result<double> GetDouble(const Json& request, const char* field) {
  const auto found = request.find(field);
  if (found == request.end() || !found->is_number()) {
    return InvalidArgument(std::string("'") + field + "' is no number");
  }
  return found->get<double>();
}

// As text where JSON has no such number.
Json DoubleJson(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : number < 0 ? "-inf" : "inf";
}

Json WideJson(NumberKind kind, WideNumber number) {
  switch (kind) {
    case NumberKind::kInteger:
      return static_cast<int64_t>(number);
    case NumberKind::kUnsigned:
      return static_cast<uint64_t>(number);
    default:
      return static_cast<double>(number);
  }
}

}  // namespace

// Of the tensors "names" of "checkpoint" and of the one whose id is "other":
// how many elements differ, and by how much at most.
Result<Json> CompareRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const StreamOptions options, OptionsOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      GetNames(request, "names"));
  Tolerances tolerances;
  TC_ASSIGN_OR_RETURN(tolerances.relative, GetDouble(request, "rtol"));
  TC_ASSIGN_OR_RETURN(tolerances.absolute, GetDouble(request, "atol"));
  TC_ASSIGN_OR_RETURN(const auto a, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const int64_t other, GetInt(request, "other"));
  TC_ASSIGN_OR_RETURN(const auto b, Checkpoints().Find(other));
  TC_ASSIGN_OR_RETURN(
      const std::vector<Difference> found,
      RunCompareJob(a, b, names, tolerances, options, job.get()));
  Json counts = Json::array(), largest = Json::array();
  for (const Difference& each : found) {
    counts.push_back(each.count);
    largest.push_back(DoubleJson(each.largest));
  }
  return Json{{"counts", std::move(counts)}, {"largest", std::move(largest)}};
}

// Of the tensor "name"; null where its dtype has no such number.
Result<Json> StatisticsRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const StreamOptions options, OptionsOf(request));
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "name"));
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const TensorStatistics found,
                      RunStatisticsJob(checkpoint, name, options, job.get()));
  const NumberKind kind = NumberKindOf(found.dtype);
  const Statistics& values = found.values;
  Json out = {{"min", nullptr},
              {"max", nullptr},
              {"mean", nullptr},
              {"nan", nullptr},
              {"inf", nullptr}};
  if (kind == NumberKind::kReal || kind == NumberKind::kComplex) {
    out["nan"] = values.nan;
    out["inf"] = values.infinite;
  }
  if (kind != NumberKind::kComplex && values.finite > 0) {
    out["min"] = WideJson(kind, values.least);
    out["max"] = WideJson(kind, values.largest);
    out["mean"] = values.Mean();
  }
  return out;
}

}  // namespace torch_ckpt::capi
