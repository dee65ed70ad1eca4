"""Consolidation: sharded checkpoints to final Hugging Face files."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from torch_ckpt import _core
from torch_ckpt.errors import CheckpointError, with_rank
from torch_ckpt.jobs import Job

_MIN_WORKERS = 2


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int] | None,
    num_threads: int = 1,
    *,
    strict: bool = True,
    verify: bool = True,
) -> None:
    """Merge the checkpoint in `input_dir` into whole tensors in `output_dir`, on this process.

    Writes model-XXXXX-of-XXXXX.safetensors by the mapping (fqn to index from 1; None: one file) and
    model.safetensors.index.json. The directory is created, and may be `input_dir` itself: the
    shards then stay. All or nothing: on an error no output is left.

    num_threads: threads, at least two. strict: a tensor that is not in the mapping, or a name of
    the mapping that is not in the checkpoint, is an error (else left out). verify: compare all
    bytes that are read with their digests, where there are any.

    Raises IncompleteError for a hole, ConflictError for overlapping shards, CorruptError for
    damage, OSError; they name file and tensor. Memory: about 16 MiB a thread.
    """
    request = _request(input_dir, output_dir, fqn_to_index_mapping, num_threads, strict, verify)
    with Job("merge") as job:
        job.run(lambda: _core.call({"op": "merge", "job": job.id, **request}))


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
    """The same by all ranks of `process_group` together: a collective call.

    Work is divided by bytes, so one output file is written by all ranks. Every rank must see both
    directories. An error on one rank is raised on all, and leaves no output.
    """
    request = _request(input_dir, output_dir, fqn_to_index_mapping, num_threads, strict, verify)
    if not dist.is_initialized():
        consolidate_safetensors_files(
            input_dir, output_dir, fqn_to_index_mapping, num_threads, strict=strict, verify=verify
        )
        return
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    begun = _everywhere(process_group, rank, lambda: _begin(request) if rank == 0 else None)[0]
    try:
        first, last = (begun["pieces"] * part // world for part in (rank, rank + 1))
        part = {**request, "first": first, "last": last}
        part.update({key: begun[key] for key in ("staging", "ids", "input_save_id")})
        parts = _everywhere(process_group, rank, lambda: _write_part(part))
        commit = {**request, "parts": [answer["crc32c"] for answer in parts]}
        commit.update({key: begun[key] for key in ("ids", "input_save_id", "in_place", "session")})
        _everywhere(
            process_group,
            rank,
            lambda: _core.call({"op": "merge_commit", **commit}) if rank == 0 else None,
        )
    except BaseException:
        if rank == 0:
            _core.call({"op": "end_save", "session": begun["session"]})
        raise


def _request(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    mapping: dict[str, int] | None,
    num_threads: int,
    strict: bool,
    verify: bool,
) -> dict[str, Any]:
    return {
        "input": os.path.abspath(input_dir),
        "output": os.path.abspath(output_dir),
        "mapping": mapping or None,
        "workers": max(_MIN_WORKERS, num_threads),
        "strict": strict,
        "verify": verify,
    }


def _begin(request: dict[str, Any]) -> Any:
    return _core.call({"op": "merge_begin", **request})


def _write_part(part: dict[str, Any]) -> Any:
    with Job("merge") as job:
        return job.run(lambda: _core.call({"op": "merge_part", "job": job.id, **part}))


def _everywhere(group: dist.ProcessGroup | None, rank: int, step: Any) -> list[Any]:
    """Run `step` here, gather what all ranks got; the first error is raised on every rank."""
    try:
        outcome: Any = (step(), None)
    except (CheckpointError, OSError) as error:
        outcome = (None, with_rank(error, rank))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


