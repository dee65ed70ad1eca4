"""What all ranks of a group must do alike, agreed through the group's store.

Not by collectives: a save in the background may be in the middle of one in the same group, and
those of two threads mix. A key lives until the last rank has read it, or, of `agree`, until its
rank agrees again. Every rank makes the same calls in the same order, and none from two threads at
once.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_ckpt.dcp.planning import rank_and_size
from torch_ckpt.errors import CheckpointError

T = TypeVar("T")

# How many agreements a group has made.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def rank_0_decides(
    group: dist.ProcessGroup | None, what: str, decide: Callable[[], T], *, timeout: float = 600.0
) -> T:
    """What `decide`, which is called on rank 0 of `group`, returns, on every rank: something that
    JSON can say. What it raises rank 0 raises; the others raise a CheckpointError that says it.

    `what` is a name for what is decided: a rank that asks for something else than rank 0 decides
    hears nothing, and not the wrong answer.

    `timeout` is how many seconds others wait for rank 0. Without a process group, just `decide()`.
    """
    rank, world_size = rank_and_size(group)
    if world_size == 1:
        return decide()
    store, key = next_key(group, what)
    if rank == 0:
        answer: dict[str, Any] = {}
        try:
            answer["value"] = decide()
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            store.set(key, json.dumps(answer))
            _forget(store, [key], world_size)
        return answer["value"]  # type: ignore[no-any-return]
    _wait(store, key, timeout)
    answer = json.loads(store.get(key))
    _forget(store, [key], world_size)
    if "error" in answer:
        raise CheckpointError(answer["error"], rank=0)
    return answer["value"]  # type: ignore[no-any-return]


def any_rank(
    group: dist.ProcessGroup | None, what: str, flag: bool, *, timeout: float = 600.0
) -> bool:
    """Whether `flag` is true on some rank of `group`; waits for all of them."""
    _, world_size = rank_and_size(group)
    if world_size == 1:
        return flag
    store, key = next_key(group, what)
    raised, arrived = f"{key}/raised", f"{key}/arrived"
    store.add(raised, int(flag))
    if store.add(arrived, 1) == world_size:
        store.set(key, str(store.add(raised, 0)))
    _wait(store, key, timeout)
    answer = int(store.get(key)) > 0
    _forget(store, [key, raised, arrived], world_size)
    return answer


# What a group's rank has left in the store, to be removed when it agrees the next time: by then all
# others have read it, or have given up.
_left: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup | None,
    key: str,
    report: Any,
    decide: Callable[[list[Any]], T],
    seconds: float,
    *,
    waits: bool,
) -> T | None:
    """What `decide` makes of the reports of all ranks of `group`, on every rank that `waits`; or
    None, on every such rank, if one has not come within some `seconds`. Reports and answer are what
    JSON can say. A rank that does not wait gets None.

    `key` is of `next_key`. All decide the same, and whose answer comes first holds: also that of a
    rank that waits no longer. None where the store cannot compare and set.
    """
    rank, world_size = rank_and_size(group)
    made: Any = group if group is not None else distributed_c10d._get_default_group()
    store = distributed_c10d._get_process_group_store(made)
    for left in _left.pop(made, []):
        store.delete_key(left)
    own = f"{key}/{rank}"
    try:
        store.compare_set(own, "", json.dumps(report))
    except NotImplementedError:
        return None
    _left[made] = [own, key]
    if not waits:
        return None
    answer: Any = None
    keys = [f"{key}/{other}" for other in range(world_size)]
    if _are_there(store, keys, key, seconds):
        # `get` would wait for one that is gone again, of a rank whose save has failed.
        reports = [json.loads(store.compare_set(of_rank, "", "null")) for of_rank in keys]
        if None not in reports:
            answer = decide(reports)
    return json.loads(store.compare_set(key, "", json.dumps(answer)))  # type: ignore[no-any-return]


def _are_there(store: Any, keys: list[str], answer: str, seconds: float) -> bool:
    """Whether all `keys` come, before there is an answer without them."""
    deadline = time.monotonic() + seconds
    pause = 0.0001
    while not store.check(keys):
        if store.check([answer]) or time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def _wait(store: Any, key: str, timeout: float) -> None:
    """Until `key` is there. Not by the store's own wait: that of TCPStore keeps other threads out,
    and rank 0 may be waiting for the save in one of them, which may need the store."""
    deadline = time.monotonic() + timeout
    pause = 0.0001
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CheckpointError(f"the ranks have not agreed within {timeout} seconds")
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def next_key(group: dist.ProcessGroup | None, what: str) -> tuple[Any, str]:
    """The group's store, and a key in it that no other call of any rank gets but this one's."""
    made: Any = group if group is not None else distributed_c10d._get_default_group()
    count = _counts.get(made, 0)
    _counts[made] = count + 1
    return distributed_c10d._get_process_group_store(made), f"torch_ckpt/{what}/{count}"


def _forget(store: Any, keys: list[str], world_size: int) -> None:
    """The last rank that has read them removes `keys`."""
    readers = f"{keys[0]}/readers"
    if store.add(readers, 1) == world_size:
        for key in [*keys, readers]:
            store.delete_key(key)
