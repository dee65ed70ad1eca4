"""From a checkpoint of one format to one of another, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.extras import extra_files
from torch_ckpt.key_mapping import KeyMapping
from torch_ckpt.mapping import NAMINGS, SHARDS
from torch_ckpt.merge import MEMORY_BUDGET, merge, merge_request
from torch_ckpt.options import check_choice, local_path
from torch_ckpt.progress import Progress

Target = Literal["torch_ckpt", "hf"]
# What is written, and what its files are called.
TARGETS = {"torch_ckpt": SHARDS, "hf": NAMINGS["hf"]}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Target | None = None,
    *,
    format: str | None = None,
    dtype: Any = None,
    keep_fp32: Sequence[str] = (),
    key_mapping: KeyMapping | None = None,
    objects: bool = True,
    max_shard_size: int | str | None = None,
    verify: bool = True,
    memory_budget: int | str = MEMORY_BUDGET,
    num_threads: int = 1,
    direct_io: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the checkpoint at `source`, of any format that is read, into directory `target`.

    The bytes are streamed, whatever the size of the checkpoint. All or nothing: on an error no
    output is left; what a kill leaves is removed when it is called again. The source is untouched;
    `target` must be another directory.

    to: "torch_ckpt" for shards as `save` writes them, with every leaf; "hf" for whole tensors as
        `from_pretrained` reads them (model.safetensors, or several files and their index). None for
        what the source is.
    format: what the source is read as, see Checkpoint; None to find out.
    objects: False leaves out the leaves that are no tensors. Else one that cannot be written, as an
        object of some class in a pickle, is an error that names it.
    dtype, keep_fp32, max_shard_size: as HuggingFaceStorageWriter's.
    key_mapping, verify, memory_budget, num_threads, direct_io, progress: as those of
        `consolidate_safetensors_files`.

    Returns {"save_id", "files", "bytes", "hulls"} of what was written; `hulls` are tensors whose
    shape no file of the source says. Raises InvalidArgumentError, UnsupportedError, and what
    `consolidate_safetensors_files` raises.
    """
    if to is None:
        found = Checkpoint(source, format=format).format
        if found not in TARGETS:
            raise UnsupportedError(
                f"is of the format {found}, which is read and not written; say to which of "
                f"{', '.join(TARGETS)} it is to be converted",
                file=local_path(source),
            )
        to = "hf" if found == "hf" else "torch_ckpt"
    check_choice("to", to, TARGETS)
    _check_apart(local_path(source), local_path(target))
    policy = DtypePolicy(dtype, keep_fp32)
    request = merge_request(
        source,
        target,
        None,
        num_threads,
        strict=True,
        verify=verify,
        max_shard_size=max_shard_size,
        naming=TARGETS[to],
        policy=policy,
        memory_budget=memory_budget,
        key_mapping=key_mapping,
        direct_io=direct_io,
        format=format,
        objects=objects,
    )
    return merge(request, extra_files(None, policy.torch_name), progress)


def _check_apart(source: str, target: str) -> None:
    """Not into the directory that is read: what is written there could replace it."""
    place = source if os.path.isdir(source) else os.path.dirname(source)
    if os.path.isdir(target) and os.path.isdir(place) and os.path.samefile(place, target):
        raise InvalidArgumentError("is the directory of the source; give another one", file=target)
