"""Ranks that are threads of this process, on real sockets: many of them, at once, and bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_ckpt.ranks import Ranks
from torch_ckpt.ranks.links import Links


def run_threads(
    size: int, call: Callable[[Ranks], Any], *, timeout: float = 20, limit: float = 60
) -> list[Any]:
    """What `call` returned, or raised, on each rank."""
    store = dist.HashStore()
    outcomes: list[Any] = [TimeoutError(f"not within {limit} seconds")] * size

    def rank_of(rank: int) -> None:
        try:
            links = Links(store, "test", rank, size, timeout)
            outcomes[rank] = call(Ranks(rank, tuple(range(size)), links))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_of, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    return outcomes
