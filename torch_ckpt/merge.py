"""Consolidation on one process: sharded checkpoints to final Hugging Face files, without torch."""

from __future__ import annotations

import os
from typing import Any

from torch_ckpt import _core
from torch_ckpt.hulls import warn_of_hulls
from torch_ckpt.jobs import MIN_WORKERS, Job
from torch_ckpt.mapping import checked_mapping
from torch_ckpt.progress import Progress, run_job


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int] | None,
    num_threads: int = 1,
    *,
    strict: bool = True,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Merge the checkpoint in `input_dir` into whole tensors in `output_dir`, on this process.

    Writes model-XXXXX-of-XXXXX.safetensors by the mapping (fqn to index from 1; None: one file) and
    model.safetensors.index.json. The directory is created, and may be `input_dir` itself: the
    shards then stay. All or nothing: on an error no output is left.

    num_threads: threads, at least four. strict: a tensor that is not in the mapping, or a name of
    the mapping that is not in the checkpoint, is an error (else left out). verify: compare all
    bytes that are read with their digests, where there are any. progress: called with bytes
    written and bytes in all, about ten times a second.

    Raises IncompleteError for a hole, ConflictError for overlapping shards, CorruptError for
    damage, OSError; they name file and tensor. Logs a warning for shapes that no file says (stock's
    shards). Memory: about 10 MiB a thread.
    """
    request = merge_request(
        input_dir, output_dir, fqn_to_index_mapping, num_threads, strict=strict, verify=verify
    )
    merge(request, progress)


def merge_request(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    mapping: dict[str, int] | None,
    num_threads: int,
    *,
    strict: bool,
    verify: bool,
) -> dict[str, Any]:
    """The fields that all requests of one merge have in common (csrc/capi/merge_requests.cc)."""
    return {
        "input": os.path.abspath(input_dir),
        "output": os.path.abspath(output_dir),
        "mapping": checked_mapping(mapping),
        "workers": max(MIN_WORKERS, num_threads),
        "strict": strict,
        "verify": verify,
    }


def merge(request: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """The whole merge. Returns {"save_id", "files", "bytes", "hulls"} of what was written."""
    with Job("merge") as job:
        answer: dict[str, Any] = run_job(
            job, lambda: _core.call({"op": "merge", "job": job.id, **request}), progress
        )
    warn_of_hulls(request["input"], answer["hulls"])
    return answer
