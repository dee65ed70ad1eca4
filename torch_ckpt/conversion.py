"""From a checkpoint of one format to one of another; torch only where pickles are written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.extras import extra_files
from torch_ckpt.hulls import warn_of_hulls
from torch_ckpt.key_mapping import KeyMapping
from torch_ckpt.mapping import NAMINGS, SHARDS
from torch_ckpt.merge import MEMORY_BUDGET, merge, merge_request
from torch_ckpt.options import check_choice, local_path
from torch_ckpt.progress import Progress

Target = Literal["torch_ckpt", "hf", "dcp", "torch"]
TARGETS = ("torch_ckpt", "hf", "dcp", "torch")


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
    """Write the checkpoint at `source`, of any format that is read, to `target`.

    The bytes are streamed, whatever the size of the checkpoint. All or nothing: on an error no
    output is left; what a kill leaves is removed when it is called again. The source is untouched;
    `target` must be elsewhere.

    to: what `target` is to be; None for what the source is.
        "torch_ckpt": a directory of shards as `save` writes them. "hf": one of whole tensors as
        `from_pretrained` reads them (model.safetensors, or several files and their index). "dcp":
        one of stock DCP, as if saved by one rank, which must not be there yet. "torch": a file of
        `torch.save`, which is replaced. The last two import torch, which pickles what is no
        tensor's elements.
    format: what the source is read as, see Checkpoint; None to find out.
    objects: False leaves out the leaves that are no tensors. Else one that cannot be written, as an
        object of some class in a pickle, is an error that names it.
    dtype, keep_fp32, max_shard_size: as HuggingFaceStorageWriter's.
    key_mapping, verify, memory_budget, num_threads, direct_io, progress: as those of
        `consolidate_safetensors_files`.

    Returns {"files", "bytes", "hulls"} of what was written; `hulls` are tensors whose shape no file
    of the source says. Raises InvalidArgumentError, ConflictError for a target that stands in the
    way, UnsupportedError, and what `consolidate_safetensors_files` raises.
    """
    kind = Checkpoint(source, format=format).format if to is None else to
    check_choice("to", kind, TARGETS)
    _check_apart(local_path(source), local_path(target))
    if kind in ("dcp", "torch") and max_shard_size is not None:
        raise InvalidArgumentError(f"max_shard_size: there are no shards of the format {kind}")
    policy = DtypePolicy(dtype, keep_fp32)
    request = merge_request(
        source,
        target,
        None,
        num_threads,
        strict=True,
        verify=verify,
        max_shard_size=max_shard_size,
        naming=SHARDS if kind == "torch_ckpt" else NAMINGS["hf"],
        policy=policy,
        memory_budget=memory_budget,
        key_mapping=key_mapping,
        direct_io=direct_io,
        format=format,
        objects=objects,
    )
    if kind in ("dcp", "torch"):
        from torch_ckpt import archives  # imports torch

        write = archives.write_dcp if kind == "dcp" else archives.write_torch
        answer = write(request, local_path(target), progress)
        warn_of_hulls(request.opened.path, answer["hulls"])
        return answer
    return merge(request, extra_files(None, policy.torch_name), progress)


def _check_apart(source: str, target: str) -> None:
    """Not into the directory that is read, nor over the file: what is written there could replace
    it."""
    place = source if os.path.isdir(source) else os.path.dirname(source)
    if os.path.exists(target) and any(
        os.path.exists(each) and os.path.samefile(each, target) for each in (place, source)
    ):
        raise InvalidArgumentError(
            "is the source, or its directory; give another path", file=target
        )
