"""What the core computes of the values of stored tensors, which it reads in pieces: no torch."""

from __future__ import annotations

from typing import Any

from torch_ckpt.native import core
from torch_ckpt.native.jobs import MIN_WORKERS, Job
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.native.progress import Progress, told

MEMORY = 64 << 20  # bytes that tensors take at most


def compare(
    a: OpenedCheckpoint,
    b: OpenedCheckpoint,
    names: list[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> list[tuple[int, float]]:
    """Of each of the tensors `names`: how many elements differ, and by how much at most. They are
    in both checkpoints, in equal shapes.

    Without tolerances elements of one dtype are compared bit by bit, so that a NaN equals itself;
    else as integers, or as float64 where one is a float, or only one a uint64. Then |a - b| <=
    atol + rtol * |b| counts as equal, and so do two NaNs. The second is 0.0 where only the bits
    differ, and NaN where one of two is a NaN.

    memory: bytes. progress: called with the bytes that were read, and with those of what is planned
    so far, as it is read. Raises what reading raises, of CheckpointError kinds, and OSError.
    """
    request = {"op": "compare", "checkpoint": a.id, "other": b.id, "rtol": rtol, "atol": atol}
    answer = _run({**request, "names": names, "memory": memory}, progress)
    return list(zip(answer["counts"], map(float, answer["largest"]), strict=True))


def statistics(
    opened: OpenedCheckpoint,
    name: str,
    *,
    verify: bool = True,
    direct_io: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What StoredTensor.statistics says; progress as of `compare`."""
    request = {"op": "statistics", "checkpoint": opened.id, "name": name, "memory": MEMORY}
    request.update(verify=verify, direct_io=direct_io)
    answer: dict[str, Any] = _run(request, progress)
    return answer


def _run(request: dict[str, Any], progress: Progress | None) -> Any:
    with Job() as job, told(job, progress):
        return job.run(lambda: core.call({**request, "workers": MIN_WORKERS, "job": job.id}))
