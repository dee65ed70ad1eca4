"""What all ranks of a group must do alike, agreed through the group's store.

Not by collectives: a save in the background may be in the middle of one in the same group, and
those of two threads mix. A key lives until the last rank has read it. Every rank makes the same
calls in the same order, and none from two threads at once.
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
