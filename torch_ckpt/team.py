"""Ranks that work on one thing for long: a Gloo group of their own, and rounds in which each hears
how the others are."""

from __future__ import annotations

import datetime
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt.dcp.agreement import next_key
from torch_ckpt.errors import CancelledError, CheckpointError, with_rank
from torch_ckpt.jobs import Job, apart, in_thread
from torch_ckpt.progress import Progress

_ROUND_S = 0.2  # how often ranks hear of each other

# The team of a process group, for work that the caller waits for: one after the other.
_teams: weakref.WeakKeyDictionary[Any, Team] = weakref.WeakKeyDictionary()


class RankGoneError(CheckpointError):
    """A rank was killed, or does not answer."""


class Team:
    """The ranks of a process group, on a Gloo group of this work alone: neither its collectives
    nor its timeout are those of training. All ranks make the same calls in the same order.

    timeout: seconds after which a rank that does not answer is taken for dead. One whose connection
    is closed is noticed at once.
    """

    def __init__(self, parent: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        store, key = next_key(parent, "team")
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(key, store),
            self.rank,
            self.size,
            datetime.timedelta(seconds=timeout),
        )

    @staticmethod
    def of(parent: dist.ProcessGroup | None, timeout: float) -> Team:
        """The team of `parent`, made once; its timeout is that of the first call."""
        group = parent or dist.group.WORLD
        team = _teams.get(group)
        if team is None:
            team = _teams[group] = Team(parent, timeout)
        return team

    def _gather(self, value: Any) -> list[Any]:
        """`value` of all ranks."""
        data = bytearray(pickle.dumps(value))
        own = torch.tensor([len(data)])
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._gloo.allgather([sizes], [own]).wait()
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._gloo.allgather([texts], [padded]).wait()
        return [
            pickle.loads(text[: int(size)].numpy().tobytes())
            for text, size in zip(texts, sizes, strict=True)
        ]

    def together(
        self,
        step: Callable[[], Any],
        *,
        job: Job | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Any]:
        """Run `step` here, under `job`, and return what it returned on every rank.

        The error of the lowest rank that has one is raised on all; the jobs of the others are
        cancelled meanwhile. So they are by Ctrl-C on any rank, which is raised there, by `cancel`
        once it is set on any rank, and by a rank that is gone, which is a RankGoneError.
        `progress` is called, on another thread, with the sums of all ranks' bytes.
        """
        interrupted = cancel or threading.Event()
        return apart(  # type: ignore[no-any-return]
            lambda: self._rounds(step, job, progress, interrupted), interrupted.set, lambda _: None
        )

    def _rounds(
        self,
        step: Callable[[], Any],
        job: Job | None,
        progress: Progress | None,
        interrupted: threading.Event,
    ) -> list[Any]:
        future = in_thread(step, "torch_ckpt-step")
        try:
            while not self._round(future, job, progress, interrupted):
                pass
            outcomes = self._gather(self._outcome(future, interrupted))
        except RuntimeError as error:  # of Gloo
            if job is not None:
                job.cancel()
            wait([future])
            raise RankGoneError(
                f"a rank is gone, or has not answered in time: {error}", rank=self.rank
            ) from error
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            # Ranks whose job was cancelled were so because of another's error.
            raise min(failures, key=lambda error: isinstance(error, CancelledError))
        return [value for value, _ in outcomes]

    def _round(
        self,
        future: Future[Any],
        job: Job | None,
        progress: Progress | None,
        interrupted: threading.Event,
    ) -> bool:
        """Whether all are done."""
        wait([future], _ROUND_S)
        ended = future.done()
        failed = interrupted.is_set() or (ended and future.exception() is not None)
        counts = (0, 0) if job is None else job.progress()
        rounds = self._gather((ended, failed, *counts))
        if job is not None and any(failed for _, failed, _, _ in rounds):
            job.cancel()
        if progress is not None:
            progress(sum(done for _, _, done, _ in rounds), sum(total for *_, total in rounds))
        return all(ended for ended, *_ in rounds)

    def _outcome(
        self, future: Future[Any], interrupted: threading.Event
    ) -> tuple[Any, BaseException | None]:
        """What the step has returned, or why it has not."""
        if interrupted.is_set():
            return None, CancelledError("was interrupted or cancelled", rank=self.rank)
        error = future.exception()
        if error is not None:
            return None, with_rank(error, self.rank)
        return future.result(), None
