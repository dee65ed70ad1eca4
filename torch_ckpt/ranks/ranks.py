"""Ranks: the processes that save, load or consolidate together."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    InvalidArgumentError,
    raise_with_rank,
)
from torch_ckpt.native.jobs import Jobs
from torch_ckpt.native.progress import Progress, told
from torch_ckpt.native.torch_private import store_of, timeout_of
from torch_ckpt.ranks.exchange import BETWEEN, Exchange
from torch_ckpt.ranks.links import Links

T = TypeVar("T")

TIMEOUT_S = 600.0

# By process group, then by purpose and timeout. Made once, and again when a rank was lost.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, float | None], Ranks]] = (
    weakref.WeakKeyDictionary()
)
# How many each process group has made.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def rank_and_size(group: dist.ProcessGroup | None = None, no_dist: bool = False) -> tuple[int, int]:
    """This rank in `group`, and how many ranks that has; (0, 1) for a process by itself. Raises
    InvalidArgumentError on a rank that is not in `group`."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidArgumentError(
            "is not in the process_group that it gave: call this on the ranks of that group alone",
            rank=dist.get_rank(),
        )
    return rank, dist.get_world_size(group)


class Ranks:
    """The ranks of a process group, on connections of their own: neither the collectives nor the
    timeouts of training are met. All ranks make the same calls in the same order, from one thread
    at a time.

    rank, size: of this process in the group.
    members: the global ranks of all.
    """

    def __init__(self, rank: int, members: tuple[int, ...], links: Links | None) -> None:
        self.rank = rank
        self.size = len(members)
        self.members = members
        self._links = links
        self._mutex = threading.Lock()  # of two threads one makes its call after the other

    @staticmethod
    def alone() -> Ranks:
        """This process by itself."""
        return Ranks(0, (0,), None)

    @staticmethod
    def of(
        group: dist.ProcessGroup | None, purpose: str = "", *, timeout: float | None = None
    ) -> Ranks:
        """What `connect` gives, made once for each purpose and timeout, and again when a rank was
        lost. Threads with different purposes may talk at the same time."""
        if rank_and_size(group)[1] == 1:
            return Ranks.alone()
        known = _known.setdefault(_made(group), {})
        ranks = known.get((purpose, timeout))
        if ranks is None or ranks._is_broken():
            ranks = known[purpose, timeout] = Ranks.connect(group, timeout=timeout)
        return ranks

    @staticmethod
    def connect(group: dist.ProcessGroup | None, *, timeout: float | None = None) -> Ranks:
        """The ranks of `group`; the default one if None, and this process alone where there is
        none. A collective call.

        timeout: seconds after which a rank that does not come or answer is taken for dead; if None
        600, or the timeout of `group` where that is longer. One whose connection is closed is
        noticed at once. Raises CheckpointError where not all come in that
        time.
        """
        rank, size = rank_and_size(group)
        if size == 1:
            return Ranks.alone()
        made = _made(group)
        count = _counts[made] = _counts.get(made, 0) + 1
        if timeout is None:
            timeout = max(TIMEOUT_S, timeout_of(made))
        store = store_of(made)
        links = Links(store, f"torch_ckpt/ranks/{count}", rank, size, timeout)
        return Ranks(rank, tuple(dist.get_process_group_ranks(made)), links)

    def places_of(self, group: dist.ProcessGroup | None) -> set[int]:
        """Those of these ranks that are in `group`; all if None."""
        if group is None:
            return set(range(self.size))
        rank_and_size(group)
        members = dist.get_process_group_ranks(group)
        return {self.members.index(each) for each in members if each in self.members}

    def _is_broken(self) -> bool:
        return self._links is not None and self._links.are_broken

    def gather(
        self,
        what: str,
        own: Callable[[], Any],
        answer: Callable[[list[Any]], T],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> T:
        """Call `own` here; on rank 0 then `answer`, with what `own` returned on every rank. Returns
        on every rank what `answer` returned.

        what: which call this is, the same on all ranks. Ranks that make different ones get an
            InvalidArgumentError that says which.
        progress: called about five times a second, on another thread, with bytes done and bytes in
            all, of the native jobs of all ranks. What it raises ends the step.
        cancel: once it is set on any rank, while a step runs there, all end with a CancelledError;
            a process by itself, where a native job of the step can still be cancelled.

        The error of the rank that fails first is raised on all, and cancels the native jobs of the
        others; one that is no CheckpointError or OSError is a CheckpointError there. Ctrl-C is
        raised where it came; the others get a CancelledError, unless all steps have ended. A rank
        that is gone is a CheckpointError that names it.
        """
        return self._exchange(what, own, lambda values: [answer(values)], progress, cancel)  # type: ignore[no-any-return]

    def scatter(
        self, what: str, own: Callable[[], Any], answers: Callable[[list[Any]], list[T]]
    ) -> T:
        """As `gather`, where `answers` returns one answer for each rank."""

        def checked(values: list[Any]) -> list[T]:
            given = answers(values)
            if len(given) != self.size:
                raise CheckpointError(f"{what}: {len(given)} answers for {self.size} ranks")
            return given

        return self._exchange(what, own, checked, None, None)  # type: ignore[no-any-return]

    def together(
        self,
        what: str,
        own: Callable[[], T],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> list[T]:
        """As `gather`: what `own` has returned on every rank."""
        return self.gather(what, own, lambda values: values, progress=progress, cancel=cancel)

    def each(self, what: str, own: Callable[[], T]) -> T:
        """As `gather`: what `own` has returned here, of which the others hear nothing."""
        made: list[T] = []
        self.gather(what, lambda: made.append(own()), lambda _: None)
        return made[0]

    def decide(self, what: str, decide: Callable[[], T]) -> T:
        """As `gather`: what `decide`, which is called on rank 0 alone, has returned."""
        return self.gather(what, lambda: None, lambda _: decide())

    @contextlib.contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """A block of all ranks, with calls of these ranks in it and code that knows nothing of
        them: an error of one rank, at whichever line, is raised on all.

        The others hear of it in their next call, whichever that is, and at the latest at the end of
        the block, where all wait for each other. What has come out of such a call is raised on all
        already. Where several ranks fail it is the first one's. Ctrl-C is raised here alone.
        """
        before = sys.exc_info()[1]
        try:
            yield
        except Exception as error:
            if not self._is_broken() and not _is_of_all(error, before):
                self._exchange(BETWEEN, _raising(error), lambda values: values, None, None)
            raise
        self.decide(f"end of {what}", lambda: None)

    def _exchange(
        self,
        what: str,
        own: Callable[[], Any],
        answers: Callable[[list[Any]], list[Any]],
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> Any:
        if self._links is not None:
            if self._links.are_broken:
                raise CheckpointError("another rank was lost in an earlier call", rank=self.rank)
            try:
                with self._mutex:
                    return Exchange(self._links, what, progress, cancel).run(own, answers)
            except Exception as error:
                error._of_all_ranks = True  # type: ignore[attr-defined]  # see as_one
                raise
        try:
            with Jobs() as jobs, told(jobs, progress, cancel):
                value = own()
                if cancel is not None and cancel.is_set():
                    raise CancelledError("was cancelled")
                return answers([value])[0]
        except Exception as error:
            raise_with_rank(error, self.rank)


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def own() -> NoReturn:
        raise error

    return own


def _is_of_all(error: BaseException | None, before: BaseException | None) -> bool:
    """Whether `error` is one that all ranks have, or came of one. `before`: what was being handled
    already."""
    while error is not None and error is not before:
        if hasattr(error, "_of_all_ranks"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _made(group: dist.ProcessGroup | None) -> Any:
    return group if group is not None else dist.group.WORLD
