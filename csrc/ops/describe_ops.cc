// describe: which tensors a checkpoint holds.
// plan: the plan of an op, of plain arguments.
//
// Plan of describe: {"checkpoint": id of an opened one, or "path": directory or
// file, "format": word}. The names are those that read takes, aliases among
// them; dtypes are the words of safetensors, shapes as its headers count them.
#include <algorithm>
#include <iterator>

#include "json/held.h"
#include "ops/tensors.h"

namespace torch_ckpt::ops {
namespace {

constexpr Field kDescribePlan[] = {{"checkpoint", FieldType::kInteger},
                                   {"path", FieldType::kString},
                                   {"format", FieldType::kString}};

Result<Listing> List(const Tensor& plan) {
  TC_ASSIGN_OR_RETURN(const Json parsed,
                      ParsePlan("describe", kDescribePlan, plan));
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointNamedBy(parsed));
  Listing listing;
  auto& [names, dtypes, shapes] = listing;
  for (const CatalogEntry& entry : checkpoint->catalog().entries()) {
    if (entry.kind == EntryKind::kObject) continue;
    names.emplace_back(entry.name);
    dtypes.emplace_back(DtypeName(entry.dtype));
    shapes.emplace_back(entry.shape.begin(), entry.shape.end());
  }
  return listing;
}

Result<std::string> PlanText(const std::string& path,
                             const std::vector<std::string>& names,
                             const std::string& more) {
  TC_ASSIGN_OR_RETURN(Json plan, ParseObject(more, "'more'"));
  if (!path.empty()) plan["path"] = path;
  if (!names.empty()) plan["names"] = names;
  try {
    return plan.dump();
  } catch (const Json::exception&) {
    return InvalidArgument("a path or name is not UTF-8");
  }
}

}  // namespace

Listing describe(Tensor plan) {
  Result<Listing> listing = List(plan);
  ThrowIfError(listing.status());
  return *std::move(listing);
}

Tensor plan(Text path, std::vector<Text> names, Text more) {
  // Each is ours to delete, also when another one is wrong.
  const std::string taken_path = Take(path), taken_more = Take(more);
  std::vector<std::string> taken_names;
  std::transform(names.begin(), names.end(), std::back_inserter(taken_names),
                 Take);
  Result<std::string> text = PlanText(taken_path, taken_names, taken_more);
  ThrowIfError(text.status());
  return BytesTensor(*text);
}

}  // namespace torch_ckpt::ops
