"""A key mapping on the names that planners plan with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.renames import KeyMapping, renamed
from torch_ckpt.native.torch_private import ShardedTensor
from torch_ckpt.planning.per_rank import is_rank_part
from torch_ckpt.planning.reserved import RESERVED, STRUCTURE_FQN
from torch_ckpt.planning.wrappers import Words

V = TypeVar("V")
_TENSORS = (torch.Tensor, ShardedTensor, TensorStorageMetadata)


def new_names(key_mapping: KeyMapping | None, values: Mapping[str, Any]) -> dict[str, str]:
    """{fqn: new name} of the tensors in `values` that `key_mapping` changes. Objects and PerRank
    values keep theirs. Raises InvalidArgumentError for a name that is taken already."""
    if key_mapping is None:
        return {}
    tensors = [
        fqn
        for fqn, value in values.items()
        if isinstance(value, _TENSORS) and not is_rank_part(fqn.rpartition(".")[2])
    ]
    names = renamed(key_mapping, tensors)
    kept = values.keys() - tensors
    for fqn, new in names.items():
        if new in RESERVED or new in kept:
            raise InvalidArgumentError(
                f"key_mapping gives it the name '{new}', which is that of something else",
                tensor=fqn,
            )
    return names


def rename(values: Mapping[str, V], names: Mapping[str, str]) -> dict[str, V]:
    return {names.get(fqn, fqn): value for fqn, value in values.items()}


def rename_paths(paths: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`paths` with renamed leaves outermost, under their new names."""
    return {
        names.get(fqn, fqn): (names[fqn],) if fqn in names else path for fqn, path in paths.items()
    }


def rename_words(words: Mapping[str, Words], names: Mapping[str, str]) -> dict[str, Words]:
    """What is said of tensors that are made of others, whose inner tensors get other names.
    Raises InvalidArgumentError where these are not of one tensor any more."""
    moved = dict(names)
    for fqn in sorted(words, key=len, reverse=True):  # an inner one may have some itself
        olds = {f".{name}": f"{fqn}.{name}" for name in words[fqn]["inner"]}
        news = {end: moved.get(old, old) for end, old in olds.items()}
        wholes = {new.removesuffix(end) for end, new in news.items()} or {fqn}
        if len(wholes) > 1 or not all(new.endswith(end) for end, new in news.items()):
            raise InvalidArgumentError(
                "key_mapping gives its inner tensors names that do not belong together", tensor=fqn
            )
        moved[fqn] = wholes.pop()
    return {moved[fqn]: said for fqn, said in words.items()}


def rename_metadata(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """`metadata` as if it were of a checkpoint with the new names."""
    known = dict(metadata.planner_data or {})
    structure = known.pop(STRUCTURE_FQN, None)
    known = rename_paths(known, names)
    if isinstance(structure, dict) and "tensors" in structure:
        structure = {**structure, "tensors": rename_words(structure["tensors"], names)}
    if structure is not None:
        known[STRUCTURE_FQN] = structure
    return dataclasses.replace(
        metadata,
        state_dict_metadata=rename(metadata.state_dict_metadata, names),
        planner_data=known,
    )
