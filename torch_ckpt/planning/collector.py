"""Python's cyclic garbage collector, paused while many objects are made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator

# Python 3.12 begins with 375 objects that are frozen. Who freezes, freezes all: thousands.
_FROZEN_BY_PYTHON = 1000
# Of the third threshold, 10 by default: so many collections of young objects, to a full one.
_SELDOM = 1000
_own: tuple[int, int, int] | None = None  # the thresholds before a pause of ours
_usual: weakref.finalize[..., object] | None = None  # brings the third threshold back


@contextlib.contextmanager
def paused_gc(*, keeps: bool = True) -> Iterator[None]:
    """Let the collector not run by itself inside the block, in the main thread. In other threads it
    does: the trainer may be running beside them, whose garbage must not wait.

    keeps: what is made inside outlives it, and counts as old at its end: freeze and unfreeze move
    all objects to the oldest generation without looking at them, where the next allocation would
    walk a plan's every object, which takes as long as making them. That what is garbage already
    does not grow old with them, the young generations are collected before the outermost block.

    A block around others that keep (all steps of planning) need not: what it makes besides is
    little, and may be garbage. After an error nothing is moved, and tensors which its
    traceback holds are freed soon. Thresholds are what is changed, so that whoever calls
    `gc.disable` meanwhile has it his way.
    """
    global _own
    if threading.current_thread() is not threading.main_thread() or not gc.isenabled():
        yield
        return
    outermost = _own is None
    if outermost:
        gc.collect(1)
        _own = gc.get_threshold()
        gc.set_threshold(0, *_own[1:])
    try:
        yield
        if keeps:
            _count_as_old()
    finally:
        if outermost:
            _resume()


@contextlib.contextmanager
def resumed_gc() -> Iterator[None]:
    """Let the collector run inside the block, in a pause of this thread's: of a native call, which
    may take long, and in which other threads go on."""
    global _own
    paused = _own is not None and threading.current_thread() is threading.main_thread()
    if paused:
        _resume()
    try:
        yield
    finally:
        if paused:
            _own = gc.get_threshold()
            gc.set_threshold(0, *_own[1:])


def seldom_full_collections(planning: object) -> None:
    """Let full collections come a hundred times as seldom, until `usual_full_collections` or until
    `planning` is gone. In the main thread, and in no pause, where there are none.

    For a bare `dcp.save` or `dcp.load`, where stock's planner makes its plan, of many objects that
    all stay, between two calls of ours: each full collection walks those and whatever else the
    process has, and takes as long as planning 5,000 tensors. It is no pause, as nothing tells us of
    an error in between: garbage of that time is found all the same.
    """
    global _usual
    third = gc.get_threshold()[2]
    if (
        threading.current_thread() is threading.main_thread()
        and gc.isenabled()
        and _own is None
        and 0 < third < _SELDOM
    ):
        _set_third(third, _SELDOM)
        _usual = weakref.finalize(planning, _set_third, _SELDOM, third)


def usual_full_collections() -> None:
    """What was made since `seldom_full_collections` counts as old, as at the end of a pause."""
    global _usual
    usual, _usual = _usual, None
    if usual is not None and usual.alive:
        gc.collect(1)
        _count_as_old()
        usual()


def _set_third(old: int, new: int) -> None:
    """The third threshold, now and after a pause, where nobody has set another."""
    global _own
    if _own is not None and _own[2] == old:
        _own = (*_own[:2], new)
    thresholds = gc.get_threshold()
    if thresholds[2] == old:
        gc.set_threshold(*thresholds[:2], new)


def _count_as_old() -> None:
    """Move all objects to the oldest generation, without looking at them."""
    if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # else unfreeze would undo the trainer's own
        gc.freeze()
        gc.unfreeze()


def _resume() -> None:
    """Also in a forked child, where the thread that would is not there."""
    global _own
    own, _own = _own, None
    if own is not None and gc.get_threshold()[0] == 0:  # else somebody has set others
        gc.set_threshold(*own)


os.register_at_fork(after_in_child=_resume)
