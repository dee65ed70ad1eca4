"""Exchanges of many ranks: the tree that they talk through, and what each hears of the others."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
from thread_ranks import run_threads

from torch_ckpt.errors import CancelledError, CheckpointError, ConflictError
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.ranks import Ranks, links, tree


def test_of_a_thousand_ranks_each_has_few_connections() -> None:
    size = 1024
    for rank in range(size):
        over = tree.above(rank)
        near = [*tree.below(rank, size), *([] if over is None else [over])]
        assert 2 * (len(near) + 1) <= 16  # two trees, with a client of the store each
        assert over is None or rank in tree.below(over, size)
        steps, at = 0, rank
        while at:
            down, at = at, tree.above(at) or 0
            assert tree.way(at, rank) == down
            steps += 1
        assert steps <= 4


def test_descriptors_and_threads_of_a_rank() -> None:
    def count(ranks: Ranks) -> int:
        ranks.together("all", lambda: 1)
        return len(os.listdir("/proc/self/fd")) if ranks.rank == 0 else 0

    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    during = run_threads(30, count)[0]
    assert during - before <= 2 * 29 + 3, "two ends for each connection, and no listeners"
    assert threading.active_count() <= threads


@pytest.mark.parametrize("size", [2, 7, 8, 50])
def test_answers(size: int) -> None:
    def call(ranks: Ranks) -> Any:
        text = b"x" * (ranks.rank * 1000)
        together = ranks.together("all", lambda: text)
        assert [len(each) for each in together] == [1000 * rank for rank in range(size)]
        own = ranks.scatter("one each", lambda: ranks.rank, lambda v: [10 * x for x in v])
        return own, ranks.gather("sum", lambda: 1, sum), ranks.decide("0", lambda: ranks.rank)

    assert run_threads(size, call) == [(10 * rank, size, 0) for rank in range(size)]


@pytest.mark.parametrize(("size", "bad"), [(2, 1), (9, 8), (50, 49), (9, 0)])
def test_rank_0_heeds_a_rank_that_failed(size: int, bad: int) -> None:
    """And answers nothing, though what it has of the others would do."""
    answered = []

    def call(ranks: Ranks) -> Any:
        def step() -> None:
            if ranks.rank == bad:
                raise ConflictError("in the way")

        ranks.gather("step", step, answered.append)

    outcomes = run_threads(size, call)
    assert answered == []
    for error in outcomes:
        assert isinstance(error, ConflictError) and error.rank == bad, outcomes


def test_the_jobs_of_all_are_cancelled_when_a_rank_fails() -> None:
    def call(ranks: Ranks) -> Any:
        def step() -> None:
            if ranks.rank == 8:
                raise ConflictError("in the way")
            with Job() as job:
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    if core.call({"op": "job_poll", "job": job.id})["cancelled"]:
                        cancelled.append(ranks.rank)
                        raise CancelledError("was cancelled")
                    time.sleep(0.01)

        ranks.gather("step", step, len)

    cancelled: list[int] = []
    outcomes = run_threads(9, call)
    assert sorted(cancelled) == list(range(8))
    assert all(isinstance(error, ConflictError) and error.rank == 8 for error in outcomes), outcomes


@pytest.mark.parametrize("gone", [0, 1, 7, 45])
def test_a_rank_that_is_gone_is_named_by_all(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands in the tree, and while most wait for others than it."""
    monkeypatch.setattr(links, "_MOMENT_S", 0.5)

    def call(ranks: Ranks) -> Any:
        ranks.together("before", lambda: 1)
        if ranks.rank == gone:
            assert ranks._links is not None
            ranks._links.close()
            return "gone"
        ranks.together("step", lambda: time.sleep(0.3))

    outcomes = run_threads(50, call)
    assert outcomes.pop(gone) == "gone"
    for error in outcomes:
        assert isinstance(error, CheckpointError) and error.rank == gone, outcomes
        assert "is gone" in str(error) and "'step'" in str(error)


def test_a_rank_that_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MOMENT_S", 0.5)
    over = threading.Event()

    def call(ranks: Ranks) -> Any:
        ranks.together("before", lambda: 1)
        if ranks.rank == 8:
            over.wait(60)
            return "stood still"
        try:
            ranks.together("step", lambda: 1)
        finally:
            if ranks.rank == 0:
                over.set()

    outcomes = run_threads(9, call, timeout=2)
    assert outcomes.pop(8) == "stood still"
    for error in outcomes:
        assert isinstance(error, CheckpointError) and error.rank == 8, outcomes


def test_a_rank_that_does_not_come_is_named() -> None:
    def call(ranks: Ranks) -> None:
        raise AssertionError("there are not all")

    say = links.Links._say

    def only(self: links.Links, word: str, text: str = "") -> None:
        if self.rank == 5:
            raise SystemExit
        say(self, word, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links.Links, "_say", only)
        outcomes = run_threads(9, call, timeout=2)
    assert isinstance(outcomes.pop(5), SystemExit)
    for error in outcomes:
        assert isinstance(error, CheckpointError) and error.rank == 5, outcomes
        assert "connecting" in str(error)


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_rank_that_cannot_connect_is_named_by_all(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when their time is over: those wait for it that are above, below or beside."""
    connect = links.Links._connect

    def without(self: links.Links, until: float) -> None:
        if self.rank == bad:
            raise OSError("GLOO_SOCKET_IFNAME is nosuch0")
        connect(self, until)

    monkeypatch.setattr(links.Links, "_connect", without)
    outcomes = run_threads(9, lambda ranks: None, timeout=300)
    for error in outcomes:
        assert isinstance(error, CheckpointError) and error.rank == bad, outcomes
        assert "nosuch0" in str(error)


class Unknown:
    """Can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return _make, ()


def _make() -> None:
    raise ModuleNotFoundError("No module named 'of_rank_0'")


def test_an_answer_that_one_rank_cannot_make_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it, and hear why."""
    monkeypatch.setattr(links, "_MOMENT_S", 0.5)

    def call(ranks: Ranks) -> Any:
        ranks.scatter("plan", lambda: None, lambda _: [None, Unknown(), None])
        ranks.gather("write", lambda: None, len)

    began = time.monotonic()
    outcomes = run_threads(3, call)
    assert time.monotonic() - began < 15
    for error in outcomes:
        assert isinstance(error, CheckpointError) and error.rank == 1, outcomes
        assert "of_rank_0" in str(error)
    assert "write" in str(outcomes[0]) and "write" in str(outcomes[2])


def test_a_call_whose_name_is_no_unicode() -> None:
    """As of a path of bytes."""

    def call(ranks: Ranks) -> Any:
        return ranks.gather("save into \udcff", lambda: 1, sum)

    assert run_threads(3, call) == [3, 3, 3]


class State:
    """Of a trainer's."""


def test_an_error_holds_no_frames() -> None:
    """With the collector off, as torchtitan has it: what a failed call has held goes with it."""
    held: list[weakref.ref[State]] = []

    def fails(ranks: Ranks, bad: int) -> None:
        def step() -> int:
            state = State()
            held.append(weakref.ref(state))
            if ranks.rank == bad:
                raise KeyError(state.__class__)
            return 1

        def answer(values: list[int]) -> int:
            state = State()
            held.append(weakref.ref(state))
            raise OSError(5, "no answer")

        own = State()
        held.append(weakref.ref(own))
        with contextlib.suppress(CheckpointError, KeyError, OSError):
            ranks.gather("step", step, answer)

    def call(ranks: Ranks) -> None:
        for bad in (0, 1, 99):
            fails(ranks, bad)
        fails(Ranks.alone(), 0)
        fails(Ranks.alone(), 99)

    gc.collect()
    gc.disable()
    try:
        assert run_threads(3, call) == [None] * 3
        call(Ranks.alone())  # in the main thread, from which native calls go to others
        assert len(held) > 40 and all(state() is None for state in held)
    finally:
        gc.enable()
