"""What both planners use: the collector paused, and which rank this is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the cyclic garbage collector off inside the block.

    What was made inside then counts as old: freeze and unfreeze move all objects to the oldest
    generation without looking at them, where the next allocation would walk a plan's every object,
    which takes as long as making them. So that no garbage of the trainer's grows old with them,
    what is young is collected before. After an error nothing is moved, and tensors which its
    traceback holds are freed soon.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
        if gc.get_freeze_count() == 0:  # else unfreeze would undo the trainer's own
            gc.freeze()
            gc.unfreeze()
    finally:
        gc.enable()


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None and world_size is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
