"""Every schema of torch.ops.dcp_ext, word for word.

The stable ABI does not compare a kernel's C++ types with its schema: a `str`
where the kernel takes an int is a wild pointer. So a changed schema must be a
decision that shows up here, and each entry is called once below it.
"""

from __future__ import annotations

import pytest
import torch

SCHEMAS = {
    "version": "dcp_ext::version() -> str",
    "plan": 'dcp_ext::plan(str path, str[] names, str more="{}") -> Tensor',
    "describe": "dcp_ext::describe(Tensor plan) -> (str[] names, str[] dtypes, int[][] shapes)",
    "save": "dcp_ext::save(Tensor[] tensors, Tensor plan, Tensor(a!) report) -> ()",
    "write": "dcp_ext::write(Tensor[] tensors, Tensor plan, Tensor(a!) report) -> ()",
    "read": "dcp_ext::read(Tensor(a!)[] targets, Tensor plan, Tensor(b!) report) -> ()",
    "stage": "dcp_ext::stage(Tensor[] tensors, Tensor plan, Tensor(a!) offsets, "
    "Tensor(b!) report, Tensor(c!)? region=None) -> ()",
    "views": "dcp_ext::views(Tensor(a -> *) region, Tensor[] like, Tensor offsets) -> Tensor(a)[]",
    "crc32c": "dcp_ext::crc32c(Tensor data, Tensor(a!) report) -> ()",
    "digests": "dcp_ext::digests(Tensor[] tensors, Tensor(a!) digests) -> ()",
}
DATA_OPS = ("save", "write", "read", "stage", "crc32c", "digests")


def registered() -> dict[str, str]:
    schemas = torch._C._jit_get_all_schemas()
    return {
        schema.name.removeprefix("dcp_ext::"): str(schema)
        for schema in schemas
        if schema.name.startswith("dcp_ext::")
    }


def test_schemas() -> None:
    assert registered() == SCHEMAS


@pytest.mark.parametrize("name", DATA_OPS)
def test_data_ops_have_kernels_for_real_memory_only(name: str) -> None:
    # Under a composite key the kernel would run on fake tensors while tracing.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"dcp_ext::{name}", "CPU")
    # Only what reads tensors takes device memory; a list with one CUDA tensor dispatches to CUDA.
    assert has(f"dcp_ext::{name}", "CUDA") == (name in ("save", "write", "stage"))
    for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "Meta"):
        assert not has(f"dcp_ext::{name}", key), key


@pytest.mark.parametrize("name", DATA_OPS)
def test_wrong_types_are_refused(name: str) -> None:
    op = getattr(torch.ops.dcp_ext, name)
    report = torch.zeros(8, dtype=torch.int64)
    plan = torch.zeros(1, dtype=torch.uint8)
    first: object = plan if name == "crc32c" else [plan]
    for arguments in (("text",), (first, "text", report), (first, plan, 3), ()):
        with pytest.raises((RuntimeError, TypeError)):
            op(*arguments)
