"""What a planner that is not ours does not see.

torch's planners take a rank's part of a DTensor for one interval of the tensor. Where it is several
(a lone `_StridedShard`, uneven shards nested in one dimension) they would save and load it in the
wrong places without a word: refused here. And of a leaf that every rank has they keep one rank's
value, whatever the others': here that is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.native.torch_private import local_tensor
from torch_ckpt.planning.boxes import LocalBox, local_boxes
from torch_ckpt.planning.digests import Digest, object_digests, tensor_digests


def check_written_boxes(planner: Any, items: list[WriteItem]) -> None:
    """Raise UnsupportedError, naming the tensor, for an item that is not a box of its DTensor."""
    if isinstance(planner, SavePlanner):
        return
    for item, boxes in _of_dtensors(planner, [(item.index, item) for item in items]):
        chunk = item.tensor_data.chunk if item.tensor_data is not None else None
        if chunk is None or not boxes:
            continue
        if len(boxes) > 1 or chunk.offsets != boxes[0].offsets or chunk.sizes != boxes[0].sizes:
            _refuse(planner, item.index.fqn, len(boxes), "saves", "torch_ckpt.SavePlanner")


def check_read_boxes(planner: Any, items: list[ReadItem]) -> None:
    """The same for the targets of a load."""
    if isinstance(planner, LoadPlanner):
        return
    for item, boxes in _of_dtensors(planner, [(item.dest_index, item) for item in items]):
        if not boxes:
            continue
        if len(boxes) > 1 or item.dest_index.offset != boxes[0].offsets:
            _refuse(planner, item.dest_index.fqn, len(boxes), "loads", "torch_ckpt.LoadPlanner")


def _of_dtensors(
    planner: Any, items: list[tuple[MetadataIndex, Any]]
) -> Iterator[tuple[Any, tuple[LocalBox, ...]]]:
    state_dict = getattr(planner, "state_dict", None)
    if not isinstance(state_dict, dict):
        return
    for index, item in items:
        value = state_dict.get(index.fqn)
        if not isinstance(value, DTensor) or 0 in value.shape:
            continue  # without elements nothing is at a wrong place, whatever box stock names
        # A local tensor with a protocol of its own says its boxes by itself.
        if not hasattr(local_tensor(value), "__create_write_items__"):
            yield item, local_boxes(value, index.fqn)


def _refuse(planner: Any, fqn: str, boxes: int, verb: str, ours: str) -> None:
    part = f"{boxes} separate boxes" if boxes > 1 else "another box than the planner says"
    raise UnsupportedError(
        f"this rank's part of it is {part}; {type(planner).__name__} {verb} one at the wrong "
        f"place. Use {ours}",
        tensor=fqn,
    )


def leaf_digests(planner: Any) -> tuple[dict[str, Digest], dict[str, Digest]]:
    """What our planner compares while planning: {fqn: digest} of leaves that are no tensors, and of
    plain tensors by their dtype and shape; and those of what is in small ones."""
    state_dict = getattr(planner, "state_dict", None)
    if isinstance(planner, SavePlanner) or not isinstance(state_dict, dict):
        return {}, {}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}, {}
    digests = object_digests(state_dict)
    for fqn, value in state_dict.items():
        if type(value) in PLAIN_TENSORS:
            digests[fqn] = f"{value.dtype} {list(value.shape)}".encode()
    return digests, tensor_digests(state_dict)


def has_method_of(planner: Any, method: str, *owners: type) -> bool:
    """Whether the planner's `method` is that of one of `owners`, and not set on the instance."""
    function = getattr(getattr(planner, method), "__func__", None)
    return any(function is getattr(owner, method) for owner in owners)
