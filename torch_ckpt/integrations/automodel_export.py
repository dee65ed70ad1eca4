"""The final files of AutoModel's `model/consolidated`: their division, and the merge."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_automodel.components.checkpoint.checkpointing import (
    _DEFAULT_HF_CONSOLIDATED_SHARD_SIZE_BYTES,
    _divide_keys_by_size,
)

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.consolidate import merge_on_every_rank
from torch_ckpt.export.extras import ExtraFiles
from torch_ckpt.export.merge import MergeRequest, make_merge, merge
from torch_ckpt.ranks import Ranks

_FLOATS = ("F64", "F32", "F16", "BF16")  # which AutoModel gives the dtype of the original

# What a rank says: the number of a tensor's file, as it sees it, and bytes of what it saves.
Division = tuple[Mapping[str, int], Mapping[str, int]]


def one_division(said: Sequence[Division], *, by_size: bool) -> dict[str, int]:
    """The number of each tensor's file, of all tensors that a rank saves and of no others.

    said: by ranks; of several ranks that say the same, one.
    by_size: there is no reference that says the numbers: where ranks have different tensors, as
        stages of a pipeline do, the numbers of each are of what it has, and all are divided anew.
    """
    sizes: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for mapping, saved in said:
        for name, size in saved.items():
            if sizes.setdefault(name, size) != size:
                raise InvalidArgumentError(
                    f"has {sizes[name]} bytes on one rank and {size} on another", tensor=name
                )
        for name, number in mapping.items():
            numbers.setdefault(name, number)
    last = max(numbers.values(), default=1)
    names = [name for name in dict.fromkeys([*numbers, *sizes]) if name in sizes]
    if by_size and len(said) > 1:
        most = _DEFAULT_HF_CONSOLIDATED_SHARD_SIZE_BYTES
        divided: dict[str, int] = _divide_keys_by_size(names, {}, most, key_size_mapping=sizes)
        return divided
    return {name: numbers.get(name, last) for name in names}


def export(
    ranks: Ranks,
    shards: str,
    output: str,
    mapping: Mapping[str, int] | None,
    dtypes: Mapping[str, str] | None,
    *,
    cast: Any = None,
    threads: int = 5,
    diffusers: bool = False,
) -> None:
    """Merge the `shards` of a model into final files in `output`, by all `ranks`.

    dtypes: of the original, by tensor: floats of 16 bits and more are stored so. cast: but those
        that are not float32 there are stored as this.
    diffusers: whether files and index are called as diffusers calls them.

    Raises what `consolidate_safetensors_files` does, on all ranks.
    """

    def make() -> tuple[MergeRequest, ExtraFiles]:
        return make_merge(
            shards,
            output,
            mapping,
            threads,
            dtype=_stored(shards, dtypes or {}, cast),
            naming="diffusers" if diffusers else "dcp",
            overwrite=True,
        )

    if ranks.size == 1:
        merge(*make())
    else:
        merge_on_every_rank(make, ranks)


def _stored(shards: str, dtypes: Mapping[str, str], cast: Any) -> dict[str, Any]:
    """The dtypes that tensors are to be stored in, of those that others than their own are for."""
    wanted: dict[str, Any] = {}
    for name, dtype in Checkpoint(os.fspath(shards)).dtypes().items():
        original = dtypes.get(name)
        if dtype not in _FLOATS:
            continue
        if cast is not None and original != "F32":
            wanted[name] = cast
        elif original in _FLOATS:
            wanted[name] = original
    return wanted
