"""The process that stock's AsyncCheckpointerType.PROCESS saves in: one a trainer, made once.

It knows the ranks of the process group it was made with and no others, and stock neither notices
when it is gone nor when another group is meant.
"""

from __future__ import annotations

import select
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as stock

from torch_ckpt.dcp import crossing
from torch_ckpt.dcp.agreement import any_rank
from torch_ckpt.dcp.async_saves import Turn, wait_for
from torch_ckpt.errors import InvalidArgumentError

_ranks: tuple[int, ...] | None = None  # that it was made with


def _is_alive(process: Any) -> bool:
    # A process that is killed closes its end of the pipe before it can be waited for.
    ends = select.poll()
    ends.register(process._process_pipe.fileno(), 0)
    hung_up = any(event & select.POLLHUP for _, event in ends.poll(0))
    return process._save_process.is_alive() and not hung_up


def prepare(group: dist.ProcessGroup | None, turn: Turn, timeout: float) -> None:
    """Called on every rank of `group` before it stages a state that it saves so. Where some rank
    has no process, or a dead one, those of all ranks are ended, and stock makes new ones; which it
    does with collectives, so that all saves that are running have to be over.

    Raises InvalidArgumentError on every rank where a process exists for other ranks.
    """
    global _ranks
    if not dist.is_initialized():
        raise InvalidArgumentError("AsyncCheckpointerType.PROCESS needs a process group")
    ranks = tuple(dist.get_process_group_ranks(group))
    process: Any = stock._CHECKPOINT_PROCESS
    is_alive = process is not None and _is_alive(process)
    is_other = is_alive and _ranks is not None and _ranks != ranks
    if any_rank(group, "other ranks", is_other, timeout=timeout):
        raise InvalidArgumentError(
            f"the process that saves was made for other ranks than {ranks}, and stock makes only "
            "one: use AsyncCheckpointerType.THREAD with further process groups",
            rank=dist.get_rank(group),
        )
    if any_rank(group, "process", not is_alive, timeout=timeout):
        wait_for(turn.running, timeout)
        if process is not None:
            process._save_process.kill()  # it may wait for the dead one
            process._save_process.join()
        stock._CHECKPOINT_PROCESS = None
    _ranks = ranks
    crossing.expect()
