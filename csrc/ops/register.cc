// All schemas of torch.ops.dcp_ext in one block, all kernels in another.
//
// Ops that touch memory exist for keys of real memory only, so that tracing
// with fake tensors never touches a file, and mutate `report`, so that no
// compiler repeats them or drops them, where the report is an input of the
// graph or is returned or read. AOTAutograd makes every mutation of a tensor of
// the graph a new tensor, and one that nobody reads goes, with what made it.
//
// Of a tensor whose class has a __torch_dispatch__ a kernel gets what that
// hands over, which may be a copy, and nothing tells.
// torch_ckpt/native/operators.py has kernels for the Python key of those that
// read or write memory, which see the tensor itself; the stable ABI has no way
// from such a kernel on to the class or the mode.
#include <string>

#include "ops/tensors.h"

namespace torch_ckpt::ops {
namespace {

std::string version() { return TORCH_CKPT_VERSION; }

}  // namespace
}  // namespace torch_ckpt::ops

STABLE_TORCH_LIBRARY_FRAGMENT(dcp_ext, library) {
  library.def("version() -> str");
  library.def("plan(str path, str[] names, str more=\"{}\") -> Tensor");
  library.def(
      "describe(Tensor plan) -> (str[] names, str[] dtypes, int[][] shapes)");
  library.def("save(Tensor[] tensors, Tensor plan, Tensor(a!) report) -> ()");
  library.def("write(Tensor[] tensors, Tensor plan, Tensor(a!) report) -> ()");
  library.def(
      "read(Tensor(a!)[] targets, Tensor plan, Tensor(b!) report) -> ()");
  library.def(
      "stage(Tensor[] tensors, Tensor plan, Tensor(a!) offsets, Tensor(b!) "
      "report, Tensor(c!)? region=None) -> ()");
  library.def(
      "views(Tensor(a -> *) region, Tensor[] like, Tensor offsets) -> "
      "Tensor(a)[]");
  library.def("crc32c(Tensor data, Tensor(a!) report) -> ()");
  library.def("digests(Tensor[] tensors, Tensor(a!) digests) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dcp_ext, CompositeExplicitAutograd, library) {
  library.impl("version", TORCH_BOX(&torch_ckpt::ops::version));
  library.impl("plan", TORCH_BOX(&torch_ckpt::ops::plan));
}

STABLE_TORCH_LIBRARY_IMPL(dcp_ext, CPU, library) {
  library.impl("describe", TORCH_BOX(&torch_ckpt::ops::describe));
  library.impl("save", TORCH_BOX(&torch_ckpt::ops::save));
  library.impl("write", TORCH_BOX(&torch_ckpt::ops::write));
  library.impl("stage", TORCH_BOX(&torch_ckpt::ops::stage));
  library.impl("views", TORCH_BOX(&torch_ckpt::ops::views));
  library.impl("read", TORCH_BOX(&torch_ckpt::ops::read));
  library.impl("crc32c", TORCH_BOX(&torch_ckpt::ops::crc32c));
  library.impl("digests", TORCH_BOX(&torch_ckpt::ops::digests));
}

// A list with one CUDA tensor dispatches to CUDA, whatever else is in it and
// wherever plan and report are. The same kernel then gets the tensors
// themselves, so that memory is never named by an address in the plan. Builds
// of torch without CUDA accept the entry and never use it.
STABLE_TORCH_LIBRARY_IMPL(dcp_ext, CUDA, library) {
  library.impl("save", TORCH_BOX(&torch_ckpt::ops::save));
  library.impl("write", TORCH_BOX(&torch_ckpt::ops::write));
  library.impl("stage", TORCH_BOX(&torch_ckpt::ops::stage));
  library.impl("views", TORCH_BOX(&torch_ckpt::ops::views));
}
