"""Consolidation by all ranks together; the collectives of a merge are here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_ckpt import _core
from torch_ckpt.errors import with_rank
from torch_ckpt.hulls import warn_of_hulls
from torch_ckpt.jobs import Job, end_session
from torch_ckpt.merge import consolidate_safetensors_files, merge, merge_request
from torch_ckpt.progress import Progress, run_job

__all__ = [
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "merge_on_every_rank",
]


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int] | None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
) -> None:
    """`consolidate_safetensors_files` by all ranks of `process_group` together: a collective call.

    Work is divided by bytes, so one output file is written by all ranks. Every rank must see both
    directories. The mapping, `strict` and `verify` are those of the group's rank 0. An error on one
    rank is raised on all, and leaves no output.
    """

    def request() -> dict[str, Any]:
        return merge_request(
            input_dir, output_dir, fqn_to_index_mapping, num_threads, strict=strict, verify=verify
        )

    if dist.is_initialized():
        merge_on_every_rank(request, process_group)
    else:
        merge(request())


def merge_on_every_rank(
    make_request: Callable[[], dict[str, Any]],
    process_group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What `merge` does, by all ranks, with its result on each. `progress` counts this rank's part.

    The coordinator begins, every rank writes a range of the pieces, the coordinator commits.
    `make_request` gives this rank's `merge_request`; what decides over the output is rank 0's, so
    that all have one plan.
    """
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    request: dict[str, Any] = {}

    def own() -> dict[str, Any] | None:
        request.update(make_request())
        return request if rank == 0 else None

    first_request = _everywhere(process_group, rank, own)[0]
    request.update({key: first_request[key] for key in ("mapping", "strict", "verify")})
    sessions: list[int] = []

    def begin() -> Any:
        if rank != 0:
            return None
        answer = _core.call({"op": "merge_begin", **request})
        sessions.append(answer["session"])
        return answer

    try:
        begun = _everywhere(process_group, rank, begin)[0]
        first, last = (begun["pieces"] * part // world for part in (rank, rank + 1))
        part = {**request, "first": first, "last": last}
        part.update({key: begun[key] for key in ("staging", "ids", "input_save_id")})
        parts = _everywhere(process_group, rank, lambda: _write_part(part, progress))
        commit = {**request, "parts": [answer["crc32c"] for answer in parts]}
        commit.update({key: begun[key] for key in ("ids", "input_save_id", "in_place", "session")})
        answers = _everywhere(
            process_group,
            rank,
            lambda: _core.call({"op": "merge_commit", **commit}) if rank == 0 else None,
        )
    except BaseException:
        for session in sessions:
            end_session("save", session)
        raise
    result: dict[str, Any] = answers[0]
    if rank == 0:
        warn_of_hulls(request["input"], result["hulls"])
    return result


def _write_part(part: dict[str, Any], progress: Progress | None) -> Any:
    with Job("merge") as job:
        return run_job(
            job, lambda: _core.call({"op": "merge_part", "job": job.id, **part}), progress
        )


def _everywhere(group: dist.ProcessGroup | None, rank: int, step: Any) -> list[Any]:
    """Run `step` here, gather what all ranks got; the first error is raised on every rank."""
    try:
        outcome: Any = (step(), None)
    except Exception as error:  # any kind: the other ranks would wait for ever
        outcome = (None, with_rank(error, rank))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]
