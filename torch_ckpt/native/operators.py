"""torch.ops.dcp_ext: the only file that says torch.ops.

The names here are those of the ops and of the C++ functions behind them (csrc/ops).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.options import local_path


def _load() -> None:
    """Load the library, unless torch or a program has. Raises ImportError where that was another
    copy: a second one would end the process, and either has its own table of jobs."""
    ours = core.library_path()
    if not hasattr(torch.ops.dcp_ext, "version"):
        core.version()  # loads libtorch_ckpt_core.so, or says why it cannot
        torch.ops.load_library(ours)
        return
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.rstrip("\n").partition("/")[2].removesuffix(" (deleted)") for line in maps}
    loaded = sorted(
        f"/{path}" for path in mapped if os.path.basename(path) == os.path.basename(ours)
    )
    if loaded and os.path.realpath(ours) not in loaded:
        raise ImportError(
            f"this process has the operators of {loaded[0]}, and this torch_ckpt has its own in "
            f"{ours}: load that file, or import torch_ckpt first"
        )


_load()


def _of_wrappers(name: str, whose: str, advice: str = "") -> Callable[..., Any]:
    """The kernel of an operator where a tensor is of a class with a `__torch_dispatch__` of its
    own, or a mode is on, as while a graph is traced.

    Such a class may call the operator with a plain copy of a tensor: that is written, with values
    that nobody else has, or filled and thrown away, and the operator sees nothing else. Here the
    tensors are still those that were given.
    """

    def kernel(given: list[torch.Tensor], *rest: Any, **named: Any) -> Any:
        from torch_ckpt.native import (
            tensors,
            torch_private,  # take long
        )

        op = getattr(torch.ops.dcp_ext, name).default
        if torch_private.in_dispatch_mode():
            return torch_private.dispatch_in_mode(op, (given, *rest), named)
        plain = []
        for number, value in enumerate(given):
            memory = tensors.memory_of(value)
            if memory is None and tensors.keeps_its_own(value):
                wrong = f"{whose} {number} {tensors.what_is_wrong(value)}{advice}"
                raise NotImplementedError(f"dcp_ext::{name}: {wrong}")
            plain.append(value if memory is None else memory)
        every = (*plain, *rest, *named.values())
        others = [type(each) for each in every if tensors.has_own_dispatch(type(each))]
        if not others:
            return op(plain, *rest, **named)
        return others[0].__torch_dispatch__(op, others, (plain, *rest), named)

    return kernel


# They last as long as this is referred to.
_KERNELS = torch.library.Library("dcp_ext", "IMPL")
_KERNELS.impl(
    "read",
    _of_wrappers("read", "target", ". torch_ckpt.load loads into it, by its own copy_"),
    "Python",
)
for _name in ("save", "write", "stage"):
    _KERNELS.impl(_name, _of_wrappers(_name, "tensor"), "Python")


def plan(
    path: str | os.PathLike[str] | None = None, names: Iterable[str] = (), **keys: Any
) -> torch.Tensor:
    """The plan of an operator, made of plain arguments.

    path: the directory or file of the checkpoint; relative to where the process stands now.
    names: of the tensors, in their order.
    keys: any others that the operator's plan has (docs/operators.md).

    Returns UTF-8 JSON in a uint8 tensor on the CPU. Raises InvalidArgumentError for a path that is
    empty or a URL, or text that is not UTF-8; the operator says which key is wrong.
    """
    if path is not None and not os.fspath(path):
        raise InvalidArgumentError("path is empty")  # not the directory where the process stands
    given: dict[str, Any] = {} if path is None else {"path": local_path(path)}
    listed = [] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        raise InvalidArgumentError(f"names is a list of names, not {names!r:.100}")
    if listed:
        given["names"] = core.names_text(listed)
    try:
        return plan_tensor({**given, **keys})
    except TypeError as error:
        raise InvalidArgumentError(f"a key of the plan cannot be JSON: {error}") from None


def plan_tensor(plan: dict[str, Any]) -> torch.Tensor:
    """The plan argument of an op: UTF-8 JSON in a uint8 tensor."""
    return torch.frombuffer(bytearray(core.request_text(plan)), dtype=torch.uint8)


def new_report() -> torch.Tensor:
    """The report argument of an op: int64[4], see csrc/ops/tensors.h."""
    return torch.zeros(4, dtype=torch.int64, device="cpu")  # whatever the default device is


def write(tensors: Sequence[torch.Tensor], plan: dict[str, Any], job: Job) -> dict[str, Any]:
    """Write tensors into files of a staging directory (csrc/ops/write_ops.cc has the plan).

    Tensors are of any strides, on the CPU or on CUDA devices, with every kernel that writes them
    done. Blocks, with the GIL released, until the files are synced. Returns {"files": [...],
    "final": {...}}, the last where the plan has any. Raises a CheckpointError or OSError that names
    file and tensor; then the files are gone again.
    """
    return _run(torch.ops.dcp_ext.write, tensors, plan, job)


def read(targets: Sequence[torch.Tensor], plan: dict[str, Any], job: Job) -> dict[str, Any]:
    """Read boxes of a checkpoint into CPU tensors (csrc/ops/read_ops.cc has the plan).

    Blocks with the GIL released. Returns {"bytes_needed", "bytes_read", "bytes_verified"}; {"met"}
    where the plan's "meeting" is "return" and targets may share memory: none is filled. Raises a
    CheckpointError or OSError; then targets may be partly filled.
    """
    return _run(torch.ops.dcp_ext.read, targets, plan, job)


@dataclass(frozen=True)
class Region:
    """Host memory that is leased until the last tensor in it is gone.

    memory: all of it, as uint8.
    used: how many bytes of it hold tensors.
    fd, offset: the memory file of this process, and where the region begins in it; None where no
        other process can map it.
    """

    memory: torch.Tensor
    used: int
    fd: int | None = None
    offset: int = 0


def stage(
    tensors: Sequence[torch.Tensor],
    names: list[str],
    *,
    workers: int,
    timeout: float,
    shared: bool = False,
) -> tuple[list[torch.Tensor], Region | None]:
    """Copies of `tensors`, dense, in one region of the process's staging arena, in the order of the
    file that a save would make of them (csrc/engine/save/snapshot_job.h).

    Tensors are of any strides, on the CPU or on CUDA devices, with every kernel that writes them
    done. Blocks, with the GIL released, until all are copied. `timeout` is how many seconds to wait
    for memory; with `shared` other processes can map it, if the system has such. Returns the copies
    and their region. Raises ExhaustedError.
    """
    if not tensors:
        return [], None
    job = Job()
    offsets = torch.empty(len(tensors), dtype=torch.int64, device="cpu")
    plan = {
        "workers": workers,
        "patience_ms": round(1000 * timeout),
        "shared": shared,
        "names": core.names_text(names),
    }
    result = _run(torch.ops.dcp_ext.stage, tensors, plan, job, offsets)
    memory = _leased(job, result["address"], result["region_bytes"])
    # Made in that mode they could be changed in it alone, and no other thread lets them go.
    with torch.inference_mode(False):
        views: list[torch.Tensor] = _without_grad(
            torch.ops.dcp_ext.views, memory, list(tensors), offsets
        )
    return views, Region(memory, result["bytes"], result.get("fd"), result.get("offset", 0))


def adopt(fd: int, offset: int, size: int, used: int) -> Region:
    """The region that another process has in its memory file `fd`: the same memory, until that
    process ends its lease, which this one is not told. `fd` may be closed.

    Raises InvalidArgumentError for anything else.
    """
    job = Job()
    request = {"op": "adopt", "job": job.id, "fd": fd, "offset": offset, "bytes": size}
    return Region(_leased(job, core.call(request)["address"], size), used)


def _leased(job: Job, address: int, size: int) -> torch.Tensor:
    region: Any = (ctypes.c_byte * size).from_address(address)
    region.lease = job  # storages keep the region, and the region the job whose memory it is
    with torch.inference_mode(False):
        return torch.frombuffer(region, dtype=torch.uint8)


def crc32c(data: torch.Tensor) -> int:
    """CRC-32C of the bytes of a contiguous CPU tensor."""
    report = new_report()
    torch.ops.dcp_ext.crc32c(data, report)
    return int(report[1])


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each tensor on the CPU the CRC-32C of its elements, in one call; -1 where it has no
    memory."""
    if not tensors:
        return []
    numbers = torch.empty(len(tensors), dtype=torch.int64, device="cpu")
    _without_grad(torch.ops.dcp_ext.digests, list(tensors), numbers)
    listed: list[int] = numbers.tolist()
    return listed


def _run(
    op: Any,
    tensors: Sequence[torch.Tensor],
    plan: dict[str, Any],
    job: Job,
    *more: torch.Tensor,
) -> dict[str, Any]:
    plan = {**plan, "job": job.id}
    blob, report = plan_tensor(plan), new_report()

    def call() -> None:
        try:
            _without_grad(op, list(tensors), blob, *more, report)
        except (RuntimeError, ValueError):
            error = job.error()
            if error is None:
                raise
            try:
                raise error from None
            finally:
                del error  # or it would find itself in this frame

    job.run(call)  # which raises what a signal handler has as well, and that is not the operator's
    result: dict[str, Any] = job.result()
    return result


@torch.no_grad()
def _without_grad(op: Any, *arguments: Any) -> Any:
    return op(*arguments)  # the mode belongs to the thread that calls
