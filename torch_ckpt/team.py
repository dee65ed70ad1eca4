"""Ranks that work on one thing for long: a Gloo group of their own, and rounds in which each hears
how the others are."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import threading
import time
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
_MOMENT_S = 2.0  # that ranks have to say that they are here, when one is missed

# The teams of a process group by their timeouts, for work that the caller waits for: one after the
# other.
_teams: weakref.WeakKeyDictionary[Any, dict[float, Team]] = weakref.WeakKeyDictionary()


class Team:
    """The ranks of a process group, on a Gloo group of this work alone: neither its collectives
    nor its timeout are those of training. All ranks make the same calls in the same order.

    timeout: seconds after which a rank that does not answer is taken for dead. One whose connection
    is closed is noticed at once.

    Raises CheckpointError where not all ranks come in that time.
    """

    def __init__(self, parent: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self._store, self._key = next_key(parent, "team")
        # A client of its own where there can be one: others wait in theirs, with all who share it.
        self._store = self._store.clone() if hasattr(self._store, "clone") else self._store
        try:
            self._say("come")
            self._gloo: Any = dist.ProcessGroupGloo(
                dist.PrefixStore(self._key, self._store),
                self.rank,
                self.size,
                datetime.timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            self._gloo = None
            raise self._gone("come", error) from error

    @staticmethod
    def of(parent: dist.ProcessGroup | None, timeout: float) -> Team:
        """The team of `parent` with this timeout, made once, and again when it lost a rank."""
        teams = _teams.setdefault(parent or dist.group.WORLD, {})
        team = teams.get(timeout)
        if team is None or team._gloo is None:
            team = teams[timeout] = Team(parent, timeout)
        return team

    def _say(self, word: str) -> None:
        self._store.set(f"{self._key}/{word}/{self.rank}", "")

    def _without_some(
        self, error: RuntimeError, step: Future[Any], job: Job | None
    ) -> CheckpointError:
        """What Gloo's error says, with the ranks that are missed, once `step` has ended."""
        self._gloo = None  # closes the connections: the others hear of it now
        if job is not None:
            job.cancel()
        with contextlib.suppress(RuntimeError):  # of the store, whose host may be gone as well
            self._say("here")  # before the wait, which may be long
        until = time.monotonic() + _MOMENT_S
        wait([step])
        time.sleep(max(0.0, until - time.monotonic()))
        return self._gone("here", error)

    def _gone(self, word: str, error: RuntimeError) -> CheckpointError:
        """The error for `error` that names the ranks that have not said `word`."""
        try:
            gone = [
                rank
                for rank in range(self.size)
                if not self._store.check([f"{self._key}/{word}/{rank}"])
            ]
        except RuntimeError:  # of the store
            return CheckpointError(
                "a rank is gone, or has not answered in time; which one cannot be said without the "
                f"process group's store, which does not answer either; noticed by rank {self.rank}:"
                f" {error}"
            )
        if not gone:  # it was stopped, and goes on
            return CheckpointError(
                f"a rank has not answered in time; noticed by rank {self.rank}: {error}"
            )
        others = f", nor have ranks {gone[1:]}" if gone[1:] else ""
        return CheckpointError(
            f"is gone, or has not answered in time{others}; noticed by rank {self.rank}: {error}",
            rank=gone[0],
        )

    def _states(self, own: tuple[int, ...]) -> list[list[int]]:
        """A few numbers of all ranks."""
        numbers = torch.tensor(own, dtype=torch.int64)
        out = [torch.empty_like(numbers) for _ in range(self.size)]
        self._gloo.allgather([out], [numbers]).wait()
        return [each.tolist() for each in out]

    def _gather(self, value: Any) -> list[Any]:
        """`value` of all ranks."""
        own = bytearray(pickle.dumps(value))
        texts = []
        for rank, (size,) in enumerate(self._states((len(own),))):
            # One after the other: one of them may be large, and the others are not then.
            text = own if rank == self.rank else bytearray(size)
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self._gloo.broadcast([torch.frombuffer(text, dtype=torch.uint8)], options).wait()
            texts.append(text)
        return [pickle.loads(text) for text in texts]

    def together(
        self,
        step: Callable[[], Any],
        *,
        job: Job | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
        to_its_end: bool = False,
    ) -> list[Any]:
        """Run `step` here, under `job`, and return what it returned on every rank.

        The error of the lowest rank that has one is raised on all; the jobs of the others are
        cancelled meanwhile. So they are by Ctrl-C on any rank, which is raised there, by `cancel`
        once it is set on any rank, by what `progress` raises, and by a rank that is gone, which is
        a CheckpointError. `progress` is called with the sums of all ranks' bytes, on another thread
        where this is the main one.
        to_its_end: Ctrl-C is raised where it came once all are done, and changes nothing.
        """
        interrupted = cancel or threading.Event()
        return apart(  # type: ignore[no-any-return]
            lambda: self._rounds(step, job, progress, interrupted),
            (lambda: None) if to_its_end else interrupted.set,
            lambda _: None,
        )

    def _rounds(
        self,
        step: Callable[[], Any],
        job: Job | None,
        progress: Progress | None,
        interrupted: threading.Event,
    ) -> list[Any]:
        future = in_thread(step, "torch_ckpt-step")
        told: Future[None] = Future()  # what came of telling `progress`, where that was an error
        try:
            while not self._round(future, job, progress, interrupted, told):
                pass
            outcomes = self._gather(self._outcome(future, interrupted, told))
        except RuntimeError as error:  # of Gloo
            raise self._without_some(error, future, job) from error
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
        told: Future[None],
    ) -> bool:
        """Whether all are done."""
        wait([future], _ROUND_S)
        ended = future.done()
        failed = interrupted.is_set() or told.done() or (ended and future.exception() is not None)
        counts = (0, 0) if job is None else job.progress()
        rounds = self._states((ended, failed, *counts))
        if job is not None and any(failed for _, failed, _, _ in rounds):
            job.cancel()
        if progress is not None and not told.done():
            try:
                progress(sum(done for _, _, done, _ in rounds), sum(total for *_, total in rounds))
            except BaseException as error:
                told.set_exception(error)
        return all(ended for ended, *_ in rounds)

    def _outcome(
        self, future: Future[Any], interrupted: threading.Event, told: Future[None]
    ) -> tuple[Any, BaseException | None]:
        """What the step has returned, or why it has not."""
        if interrupted.is_set():
            return None, CancelledError("was interrupted or cancelled", rank=self.rank)
        error = told.exception() if told.done() else future.exception()
        if error is not None:
            return None, _portable(with_rank(error, self.rank), self.rank)
        return future.result(), None


def _portable(error: BaseException, rank: int) -> BaseException:
    """`error`, or what it says where it is of a class that cannot be pickled and made again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}", rank=rank)
    return error
