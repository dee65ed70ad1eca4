"""What other ranks of this node load as well, as far as a rank can tell without asking them.

Such bytes are read through the page cache, so that they come from storage once. A wrong guess costs
no more than speed: some CPU here, bytes that are read twice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor


def wanted_by_neighbours(value: Any, lengths: Sequence[int], ranks: int) -> bool:
    """Whether another one of the `ranks` of this node loads the same box.

    value: the leaf of the state dict that the box, of these `lengths`, is for. A DTensor says who
    has the same shard; of other leaves it is known only whether they are whole, as replicas are.
    """
    if ranks <= 1:
        return False
    if not isinstance(value, DTensor):
        return value is None or list(lengths) == list(value.size())
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return False
    own = dist.get_rank()
    first = own // ranks * ranks
    node = range(first, first + ranks)
    if sum(rank in node for rank in mesh.mesh.flatten().tolist()) < ranks:
        return True  # what the others have, this mesh does not say
    same = mesh.mesh[
        tuple(
            at if placement.is_shard() else slice(None)
            for at, placement in zip(place, value.placements, strict=True)
        )
    ]
    return any(rank != own and rank in node for rank in same.flatten().tolist())
