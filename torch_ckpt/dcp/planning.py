"""What both planners use: the collector paused, and which rank this is."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_paused = False  # by a block of ours, and not by the trainer


@contextlib.contextmanager
def paused_gc(*, keeps: bool = True) -> Iterator[None]:
    """Keep the cyclic garbage collector off inside the block.

    keeps: what is made inside outlives it, and counts as old at its end: freeze and unfreeze move
    all objects to the oldest generation without looking at them, where the next allocation would
    walk a plan's every object, which takes as long as making them. That what is garbage already
    does not grow old with them, the young generations are collected before the outermost block.

    A block around others that keep (a whole save around its planning) need not: what it makes
    besides is little, and may be garbage. After an error nothing is moved, and tensors which its
    traceback holds are freed soon.
    """
    global _paused
    outermost = gc.isenabled()
    if not outermost and not _paused:  # the trainer sees to it
        yield
        return
    if outermost:
        gc.collect(1)
        gc.disable()
        _paused = True
    try:
        yield
        if keeps and gc.get_freeze_count() == 0:  # else unfreeze would undo the trainer's own
            gc.freeze()
            gc.unfreeze()
    finally:
        if outermost:
            _paused = False
            gc.enable()


def _resume_in_child() -> None:
    """The thread that would is not there, if it is another one than the one that forked."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)


def paused_while_trainer_waits(*, keeps: bool) -> contextlib.AbstractContextManager[None]:
    """`paused_gc` in the main thread, and nothing in others: beside those the trainer may be
    running, whose garbage must not wait."""
    waits = threading.current_thread() is threading.main_thread()
    return paused_gc(keeps=keeps) if waits else contextlib.nullcontext()


def has_method_of(planner: Any, method: str, *owners: type) -> bool:
    """Whether the planner's `method` is that of one of `owners`, and not set on the instance."""
    function = getattr(getattr(planner, method), "__func__", None)
    return any(function is getattr(owner, method) for owner in owners)


def rank_and_size(group: dist.ProcessGroup | None = None, no_dist: bool = False) -> tuple[int, int]:
    """This rank in `group`, and how many ranks that has; (0, 1) for a process by itself."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None and world_size is not None:
        return rank, world_size
    return rank_and_size()
