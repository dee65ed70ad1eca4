"""What a reader that serves one request at a time owes its planner: that nothing stays unfilled, or
is filled with codes in place of numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import IncompleteError, UnsupportedError
from torch_ckpt.native.torch_private import ShardedTensor, local_tensor


def _local_elements(target: Any) -> int | None:
    """Elements that this rank holds of `target`; None where that cannot be known."""
    if isinstance(target, DTensor):
        return local_tensor(target).numel()
    if isinstance(target, ShardedTensor):
        return sum(shard.tensor.numel() for shard in target.local_shards())
    if type(target) in (torch.Tensor, torch.nn.Parameter):
        return int(target.numel())
    return None


def check_no_numbers(items: list[ReadItem], scaled: Collection[str], path: str) -> None:
    """Raise UnsupportedError for `items` of tensors that are `scaled`, see Listing: requests read
    the codes."""
    for item in items:
        if item.storage_index.fqn in scaled:
            raise UnsupportedError(
                "is made of codes and scales, which a reader with a `_process_read_request` of its "
                "own does not: derive it from CheckpointReader, and make the numbers there",
                file=path,
                tensor=item.storage_index.fqn,
            )


def check_filled(items: list[ReadItem], planner: LoadPlanner, path: str) -> None:
    """Raise IncompleteError if `items` leave a part of a target as it is.

    A subclass may change sizes in the metadata (dequantization); where it leaves the chunks alone
    the planner asks for too little, and the rest of the target would keep its old values.
    """
    state_dict = getattr(planner, "state_dict", None)
    if not isinstance(state_dict, dict):
        return
    planned: dict[str, int] = {}
    for item in items:
        fqn = item.dest_index.fqn
        planned[fqn] = planned.get(fqn, 0) + math.prod(item.lengths)
    for fqn, elements in planned.items():
        wanted = _local_elements(state_dict.get(fqn))
        if wanted is not None and elements < wanted:
            raise IncompleteError(
                f"its stored chunks fill {elements} of the {wanted} elements of the target",
                file=path,
                tensor=fqn,
            )
