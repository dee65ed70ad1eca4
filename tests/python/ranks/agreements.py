"""Ranks: what one hears of the others, and how an error of one becomes the error of all."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.run import Context, cases, raised

import torch_ckpt
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.ranks import Ranks, links, tree

CASES, case = cases()


@case
def answers(context: Context) -> None:
    for group in (None, dist.new_group(backend="gloo")):
        ranks = Ranks.of(group)
        assert (ranks.rank, ranks.size) == (context.rank, context.world)
        assert ranks.members == tuple(range(context.world))
        for number in range(3):
            total = ranks.gather("sum", lambda: context.rank + number, sum)  # noqa: B023
            assert total == sum(rank + number for rank in range(context.world))
            own = ranks.scatter("one each", lambda: context.rank, lambda v: [10 * x for x in v])
            assert own == 10 * context.rank
            assert ranks.together("all", lambda: context.rank) == list(range(context.world))
            assert ranks.decide("rank 0", lambda: ["of", context.rank]) == ["of", 0]


@case
def a_block_of_all_ranks(context: Context) -> None:
    """What fails in it between two calls is heard of in whichever call the others are."""
    ranks = Ranks.of(None)
    for failing in {0, context.world - 1}:
        for line in range(3):
            went_on = []

            def block(
                failing: int = failing, line: int = line, went_on: list[int] = went_on
            ) -> None:
                with ranks.as_one("block"):
                    for number in range(2):
                        if (context.rank, line) == (failing, number):
                            raise ZeroDivisionError("between")
                        ranks.decide(f"call {number}", lambda: went_on.append(1))
                    if (context.rank, line) == (failing, 2):
                        raise ZeroDivisionError("between")

            error = raised(block, "between")
            own = context.rank == failing
            assert isinstance(error, ZeroDivisionError if own else torch_ckpt.CheckpointError)
            assert own or error.rank == failing
            assert len(went_on) == (line if context.rank == 0 else 0)
            assert ranks.together("after", lambda: context.rank) == list(range(context.world))
        try:  # while the error of another block is handled, another rank fails
            raise error
        except Exception:

            def of_a_call() -> None:
                with ranks.as_one("block"):
                    ranks.each("call", lambda: 1 // (0 if context.rank else 1))

            raised(of_a_call, "by zero") if context.world > 1 else None
            raised(block, "between")


@case
def a_rank_outside_of_the_group(context: Context) -> None:
    """Is told so, and named; the others go on."""
    outside = context.world - 1
    path, merged = context.folder / "c", context.folder / "merged"
    state = {"w": torch.ones(3)}
    calls = (
        lambda group: torch_ckpt.save(state, path, process_group=group),
        lambda group: torch_ckpt.load(state, path, process_group=group),
        lambda group: torch_ckpt.async_save(state, path, process_group=group).result(),
        lambda group: torch_ckpt.consolidate_safetensors_files_on_every_rank(
            path, merged, process_group=group, overwrite=True
        ),
        lambda group: torch_ckpt.CheckpointDirectory(path, process_group=group).load(
            state, missing_ok=True
        ),
    )
    for members in (list(range(outside)), [0]):
        group = dist.new_group(members)
        for call in calls:
            if context.rank in members:
                call(group)
            elif context.rank == outside:
                with pytest.raises(torch_ckpt.InvalidArgumentError) as told:
                    call(group)
                assert f"rank {outside}" in str(told.value) and told.value.rank == outside
                assert "process_group" in str(told.value)
    assert context.rank or (merged / "model-00001-of-00001.safetensors").exists()


@case
def longer_timeouts_of_a_group_count(context: Context) -> None:
    """Where a call says none, for consolidations as for saves."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1200))
    path = context.folder / "c"
    torch_ckpt.save({"w": torch.ones(3)}, path, process_group=group)
    seconds = []
    connect = links.Links.__init__

    def noted(self: Any, store: Any, key: str, rank: int, size: int, timeout: float) -> None:
        seconds.append(timeout)
        connect(self, store, key, rank, size, timeout)

    links.Links.__init__ = noted  # type: ignore[method-assign]
    try:
        for number, given in enumerate(({}, {"timeout": 30.0}, {"background": True})):
            future = torch_ckpt.consolidate_safetensors_files_on_every_rank(
                path, context.folder / str(number), process_group=group, **given
            )
            if future is not None:
                future.result()
    finally:
        links.Links.__init__ = connect  # type: ignore[method-assign]
    assert seconds == [1200.0, 30.0, 1200.0], seconds


@case
def texts_of_any_length(context: Context) -> None:
    ranks = Ranks.of(None)
    for size in (0, 1, 1000, 1_000_000):
        own = b"x" * (size * (context.rank + 1))
        texts = ranks.together("texts", lambda: own)  # noqa: B023
        assert [len(text) for text in texts] == [size * (r + 1) for r in range(context.world)]
        answer = ranks.scatter("back", lambda: own, lambda given: given)  # noqa: B023
        assert answer == own


@case
def one_for_each_group(context: Context) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    made = [Ranks.of(group, timeout=60) for group in (None, *groups, None, *groups)]
    assert made[:3] == made[3:]
    others = [Ranks.of(None, timeout=61), Ranks.of(None, "beside", timeout=60)]
    assert len(set(map(id, made[:3] + others))) == 5
    for ranks in made:
        assert ranks.together("ranks", lambda: context.rank) == list(range(context.world))


@case
def a_long_timeout_of_the_group_is_heard(context: Context) -> None:
    """Not a shorter one than ours: those of training are."""
    for hours, seconds in ((2, 7200), (0.01, 600)):
        group = dist.new_group(timeout=datetime.timedelta(hours=hours), backend="gloo")
        links = Ranks.of(group)._links
        assert links is not None and links._timeout == seconds


@case
def few_descriptors(context: Context) -> None:
    """Those of the ranks above and below in the tree, and a client of the store."""
    before = len(os.listdir("/proc/self/fd"))
    ranks = Ranks.connect(None)
    assert ranks.together("all", lambda: 1) == [1] * context.world
    near = len(tree.below(context.rank, context.world)) + (context.rank > 0)
    assert len(os.listdir("/proc/self/fd")) - before <= near + 1


@case
def an_error_is_that_of_all(context: Context) -> None:
    ranks = Ranks.of(None)

    def fails() -> None:
        if context.rank == 1:
            raise FileNotFoundError(2, "No such file", "the root")

    error = raised(lambda: ranks.gather("step", fails, len), "rank 1", "No such file")
    assert isinstance(error, FileNotFoundError) and error.filename == "the root"

    def damaged(_: Any) -> None:
        raise torch_ckpt.CorruptError("not what was written", file="f")

    error = raised(lambda: ranks.gather("step", lambda: None, damaged), "rank 0", "not what")
    assert isinstance(error, torch_ckpt.CorruptError)

    class Odd(Exception):
        def __init__(self, one: Any, two: Any) -> None:
            super().__init__("cannot be made again")

    def odd() -> None:
        if context.rank == 1:
            raise Odd(1, 2)

    error = raised(lambda: ranks.gather("step", odd, len), "cannot be made again")
    assert isinstance(error, Odd if context.rank == 1 else torch_ckpt.CheckpointError)
    error = raised(lambda: ranks.gather("step", threading.Lock, len), "pickle")
    # And the ranks go on as before.
    assert ranks.gather("sum", lambda: 1, sum) == context.world


def at_work() -> None:
    """For a minute, unless that is cancelled."""
    with Job() as job:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            state = core.call({"op": "job_poll", "job": job.id})
            if state["cancelled"]:
                raise torch_ckpt.CancelledError("was cancelled")
            time.sleep(0.01)


@case
def the_others_jobs_are_cancelled(context: Context) -> None:
    """Rank 1 fails at once; the others would be at work for a minute."""
    ranks = Ranks.of(None)

    def step() -> None:
        if context.rank == 1:
            raise torch_ckpt.ConflictError("in the way")
        at_work()

    began = time.monotonic()
    error = raised(lambda: ranks.gather("step", step, len), "rank 1", "in the way")
    assert isinstance(error, torch_ckpt.ConflictError)
    assert time.monotonic() - began < 30, "the others heard of it too late"


@case
def different_calls(context: Context) -> None:
    ranks = Ranks.of(None)
    what = f"save into step-{min(context.rank, 1)}"
    error = raised(
        lambda: ranks.gather(what, lambda: 1, sum), "different calls", "step-0", "step-1"
    )
    assert isinstance(error, torch_ckpt.InvalidArgumentError)
    assert ranks.gather("sum", lambda: 1, sum) == context.world


@case
def an_interrupt_is_raised_where_it_came(context: Context) -> None:
    ranks = Ranks.of(None)

    def step() -> None:
        if context.rank == 1:
            raise KeyboardInterrupt

    try:
        ranks.gather("step", step, len)
        raise AssertionError("nobody heard of it")
    except KeyboardInterrupt:
        assert context.rank == 1
    except torch_ckpt.CancelledError as error:
        assert context.rank != 1 and error.rank == 1


@case
def one_is_much_later(context: Context) -> None:
    """Neither a late step nor a late answer meets the timeout of ranks that do not answer."""
    ranks = Ranks.of(None, timeout=2)

    def late() -> int:
        time.sleep(4 if context.rank == 1 else 0)
        return 1

    assert ranks.gather("late step", late, sum) == context.world

    def late_answer(values: list[int]) -> int:
        time.sleep(4)
        return sum(values)

    assert ranks.gather("late answer", lambda: 1, late_answer) == context.world


@case
def what_progress_raises_ends_the_step(context: Context) -> None:
    ranks = Ranks.of(None)

    def progress(done: int, total: int) -> None:
        raise ValueError("no bar")

    def step() -> None:
        time.sleep(0.5)

    told = progress if context.rank == 1 else None

    def late(done: int, total: int) -> None:
        """Raises when its own step has ended and the others' have not."""
        if time.monotonic() - began > 0.5:
            raise ValueError("no bar any more")

    began = time.monotonic()
    raised(
        lambda: ranks.gather(
            "step",
            (lambda: None) if context.rank == 1 else at_work,
            len,
            progress=late if context.rank == 1 else None,
        ),
        "no bar any more",
    )
    raised(lambda: ranks.gather("step", step, len, progress=told), "no bar")
    cancel = threading.Event()
    if context.rank == 1:
        cancel.set()
    error = raised(lambda: ranks.gather("step", step, len, cancel=cancel), "was cancelled")
    assert isinstance(error, torch_ckpt.CancelledError)


@case
def as_many_answers_as_ranks(context: Context) -> None:
    ranks = Ranks.of(None)
    for count in (0, 1, context.world + 1):
        error = raised(
            lambda: ranks.scatter("plan", lambda: 1, lambda _: ["x"] * count),  # noqa: B023
            f"{count} answers for {context.world} ranks",
        )
        assert isinstance(error, torch_ckpt.CheckpointError)
    assert ranks.gather("sum", lambda: 1, sum) == context.world


@case
def a_cancel_counts_until_all_have_ended(context: Context) -> None:
    """Also on a rank that has done its own."""
    ranks = Ranks.of(None)
    cancel = threading.Event()
    if context.rank == 1:
        threading.Timer(0.5, cancel.set).start()
    error = raised(
        lambda: ranks.gather(
            "step", (lambda: None) if context.rank == 1 else at_work, len, cancel=cancel
        ),
        "rank 1",
        "was cancelled",
    )
    assert isinstance(error, torch_ckpt.CancelledError)


@case
def ctrl_c_on_rank_0_while_others_work(context: Context) -> None:
    ranks = Ranks.of(None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    answered = []
    try:
        if context.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ranks.gather("step", (lambda: None) if context.rank == 0 else at_work, answered.append)
        raise AssertionError("nobody heard of it")
    except KeyboardInterrupt:
        assert context.rank == 0
    except torch_ckpt.CancelledError as error:
        assert context.rank != 0 and error.rank == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert answered == []
    assert ranks.gather("sum", lambda: 1, sum) == context.world


@case
def two_threads(context: Context) -> None:
    """One makes its call after the other."""
    ranks = Ranks.of(None)
    sums: list[int] = []

    def call() -> None:
        sums.extend(ranks.gather("sum", lambda: 1, sum) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [context.world] * 40
