"""Async saves of torch_ckpt.megatron.dist_checkpointing on several ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.dist_checkpointing import check, gpt
from ranks.dist_errors import without_data
from ranks.run import Context, cases, everywhere, raised

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
)
from torch_ckpt.native import operators

CASES, case = cases()


def polled(queue: AsyncCallsQueue, calls: int) -> list[tuple[int, int]]:
    """Train, and poll as Megatron does, until `calls` are finalized: (number, poll) of each."""
    done: list[tuple[int, int]] = []
    step = torch.zeros(1)
    for poll in range(20_000):
        done += [(number, poll) for number in queue.maybe_finalize_async_calls()]
        if len(done) == calls:
            return done
        dist.all_reduce(step)
        time.sleep(0.001)
    raise AssertionError(f"finalized {done}")


@case
def async_saves_are_finalized_at_one_poll(context: Context) -> None:
    rank, world = context.rank, context.world
    queue = AsyncCallsQueue()
    order: list[Any] = []
    for number in range(3):
        state = gpt(rank, world)
        path = context.folder / f"c{number}"
        request = dist_checkpointing.save(state, path, async_sharded_save=True)
        assert request is not None
        request.add_finalize_fn(dist.barrier)
        request.add_finalize_fn(lambda number=number: order.append(number))
        request.add_finalize_fn(
            lambda number=number, path=path: order.append(
                (number, dist_checkpointing.check_is_distributed_checkpoint(path))
            )
        )
        assert queue.schedule_async_request(request) == number
        for layer in state["layers"]:  # training goes on
            for entry in layer.values():
                if isinstance(entry.data, torch.Tensor):
                    entry.data.fill_(-7.0)
        state["optimizer"]["param_groups"][0]["lr"] = -7.0
    assert queue.get_num_unfinalized_calls() > 0
    done = polled(queue, 3)
    assert [number for number, _ in done] == [0, 1, 2]
    assert len({tuple(each) for each in everywhere(done)}) == 1, everywhere(done)
    assert order == [0, (0, True), 1, (1, True), 2, (2, True)]
    assert queue.get_num_unfinalized_calls() == 0
    for number in range(3):
        loaded = dist_checkpointing.load(
            gpt(rank, world, filled=False), context.folder / f"c{number}"
        )
        check(loaded, rank, world, world)


@case
def ranks_may_be_polls_apart(context: Context) -> None:
    """Nothing but the polls is between them, and a rank may have made many before another."""
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save({"step": 1}, context.folder / "a", async_sharded_save=True)
    request.add_finalize_fn(dist.barrier)
    queue.schedule_async_request(request)
    done = []
    for poll in range(5000):
        done += [(number, poll) for number in queue.maybe_finalize_async_calls()]
        if done:
            break
        time.sleep(0.002 * (1 + 3 * ((context.rank + poll // 50) % context.world)))
    assert len({tuple(each) for each in everywhere(done)}) == 1 and done, everywhere(done)


@case
def polls_wait_for_no_rank(context: Context) -> None:
    """Rank 0 polls while the others are elsewhere, with a save under way or over, and without."""
    queue, go = AsyncCallsQueue(), threading.Event()
    queue.schedule_async_request(AsyncRequest(go.wait, (60,), []))
    polls = context.folder / "polls"
    if context.rank > 0:
        deadline = time.monotonic() + 15
        while not polls.exists():
            assert time.monotonic() < deadline, "rank 0 has not come through its polls"
            time.sleep(0.01)
    for _ in range(20):
        assert queue.maybe_finalize_async_calls() == []
    if context.rank == 0:
        polls.touch()
    go.set()
    polled(queue, 1)


@case
def a_rank_that_cannot_stage_is_an_error_of_all(context: Context) -> None:
    """There at once, elsewhere at a poll; and the old checkpoint stays."""
    last = context.rank == context.world - 1
    path = context.folder / "c"

    def state(value: float) -> dict[str, Any]:
        data = torch.full((2,), value)
        own = ShardedTensor.from_rank_offsets("own", data, (0, context.rank, context.world))
        return {"own": own}

    dist_checkpointing.save(state(1.0), path)
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save(state(2.0), path, async_sharded_save=True)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch_ckpt.ExhaustedError("no memory to stage")

    def attempt() -> None:
        with mock.patch.object(operators, "stage", fails) if last else contextlib.nullcontext():
            queue.schedule_async_request(request)
        for _ in range(5000):  # without the rank that has failed
            queue.maybe_finalize_async_calls()
            time.sleep(0.002)

    raised(attempt, "no memory to stage")
    queue.close(abort=True)
    assert dist_checkpointing.load(state(0.0), path)["own"].tolist() == [1.0, 1.0]
    dist_checkpointing.save(state(3.0), path)
    assert dist_checkpointing.load(state(0.0), path)["own"].tolist() == [3.0, 3.0]


@case
def an_async_save_that_fails_is_an_error_at_the_poll(context: Context) -> None:
    queue = AsyncCallsQueue()
    called: list[int] = []
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=context.rank)}
    (context.folder / "file").touch()
    nowhere = context.folder / "file" / "c"
    request = dist_checkpointing.save(state, nowhere, async_sharded_save=True)
    assert request is not None
    request.add_finalize_fn(lambda: called.append(1))
    queue.schedule_async_request(request)
    raised(lambda: polled(queue, 1), "file")
    assert not called and queue.get_num_unfinalized_calls() == 0
    request = dist_checkpointing.save(state, context.folder / "c", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.close()
    assert torch.equal(
        dist_checkpointing.load_plain_tensors(context.folder / "c")["w"], torch.ones(2)
    )


@case
def requests_of_the_application(context: Context) -> None:
    queue = AsyncCallsQueue(persistent=True)
    rank = context.rank
    go = threading.Event()
    ran: list[Any] = []

    def work(first: str, staged: int, last: str, *, more: int) -> None:
        assert go.wait(60)
        ran.append(
            (first, staged, last, more, threading.current_thread() is threading.main_thread())
        )

    queue.schedule_async_request(
        AsyncRequest(
            work,
            ("a", None, "b"),
            [dist.barrier],
            async_fn_kwargs={"more": 1},
            preload_fn=lambda: 5,
        )
    )
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: ran.append("end")]))
    for _ in range(3):
        assert queue.maybe_finalize_async_calls() == []
        dist.barrier()
    if rank == 0:
        go.set()
        time.sleep(0.05)
    for _ in range(3):  # the others are still at work
        assert context.world == 1 or queue.maybe_finalize_async_calls() == []
        dist.barrier()
    go.set()
    done = polled(queue, 2)
    assert [number for number, _ in done] == [0, 1]
    assert len({tuple(each) for each in everywhere(done)}) == 1
    assert ran == [("a", 5, "b", 1, False), "end"]

    def fails() -> None:
        if rank == context.world - 1:
            raise ValueError("of the application")

    frozen = AsyncRequest(fails, (), []).freeze()
    try:
        frozen.add_finalize_fn(print)
        raise AssertionError("a frozen request has taken a function")
    except RuntimeError:
        pass
    queue.schedule_async_request(frozen)
    raised(lambda: polled(queue, 1), "of the application")
    queue.schedule_async_request(frozen)
    raised(queue.close, "of the application")
    queue.schedule_async_request(frozen)
    if rank == context.world - 1:
        try:
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            raise AssertionError("no error")
        except ValueError:
            pass
    else:
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [4]


@case
def calls_of_the_application_that_fail_on_one_rank(context: Context) -> None:
    """All hear of it, at a poll or in the call that does all of it now; and the next save is
    right."""
    last = context.rank == context.world - 1
    queue = AsyncCallsQueue()

    def fails(*_: Any) -> None:
        if last:
            raise ValueError("of the application")

    with_preload = AsyncRequest(lambda *_: None, (1, 2), [], preload_fn=fails)
    queue.schedule_async_request(with_preload)
    raised(lambda: polled(queue, 1), "of the application")
    queue.schedule_async_request(with_preload)
    raised(queue.close, "of the application")
    raised(with_preload.execute_sync, "of the application")
    called: list[int] = []
    now = AsyncRequest(fails, (), [lambda: called.append(1)])
    raised(now.execute_sync, "of the application")
    assert not called
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=context.rank)}
    dist_checkpointing.save(state, context.folder / "c")
    AsyncRequest(called.append, (2,), [lambda: called.append(3)]).execute_sync()
    assert called == [2, 3]


@case
def a_rank_that_looks_at_its_own_calls(context: Context) -> None:
    """Polls of one rank alone do not count among those that all make."""
    queue = AsyncCallsQueue()
    for _ in range(3 if context.rank == 0 else 0):
        assert queue.maybe_finalize_async_calls(no_dist=True) == []
    go, ran = threading.Event(), []
    queue.schedule_async_request(AsyncRequest(go.wait, (60,), [lambda: ran.append(1)]))
    if context.world > 1:
        last = context.rank == context.world - 1
        for mine in (not last, last):  # what the first to come has said holds for the last one
            if mine:
                go.set()
                queue._calls[0].future.result(60)
                assert queue.maybe_finalize_async_calls() == []
            dist.barrier()
    go.set()
    done = polled(queue, 1)
    assert len({tuple(each) for each in everywhere(done)}) == 1
    assert ran == [1]


@case
def a_queue_that_is_aborted(context: Context) -> None:
    queue = AsyncCallsQueue()
    path, called = context.folder / "c", []

    def state(value: float) -> dict[str, Any]:
        data = torch.full((2,), value)
        return {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=context.rank)}

    dist_checkpointing.save(state(0.0), path)
    before = path.stat().st_ino, sorted(each.name for each in path.iterdir())
    with held_until_cancelled(2) as cancelled:
        request = AsyncRequest(cancelled.wait, (60,), [lambda: called.append(0)])
        queue.schedule_async_request(request)
        for value in (1.0, 2.0):
            request = dist_checkpointing.save(state(value), path, async_sharded_save=True)
            assert request is not None
            request.add_finalize_fn(lambda: called.append(1))
            queue.schedule_async_request(request)
        queue.close(abort=True)
    assert not called and queue.get_num_unfinalized_calls() == 0
    assert dist_checkpointing.load_plain_tensors(path)["w"].tolist() == [0.0, 0.0]
    assert (path.stat().st_ino, sorted(each.name for each in path.iterdir())) == before
    dist_checkpointing.save(state(3.0), path)
    assert dist_checkpointing.load_plain_tensors(path)["w"].tolist() == [3.0, 3.0]


@contextlib.contextmanager
def held_until_cancelled(saves: int) -> Iterator[threading.Event]:
    """Saves of this rank write nothing before so many have been asked to stop; then it is set."""
    write, cancel = operators.write, torch_ckpt.AsyncSave.cancel
    cancelled, asked = threading.Event(), []

    def held(*arguments: Any, **options: Any) -> Any:
        assert cancelled.wait(60)
        return write(*arguments, **options)

    def seen(self: torch_ckpt.AsyncSave) -> bool:
        asked.append(cancel(self))
        if len(asked) == saves:
            cancelled.set()
        return asked[-1]

    operators.write, torch_ckpt.AsyncSave.cancel = held, seen
    try:
        yield cancelled
        assert asked == [True] * saves
    finally:
        operators.write, torch_ckpt.AsyncSave.cancel = write, cancel


@case
def errors_while_it_is_prepared_are_of_all(context: Context) -> None:
    last = context.rank == context.world - 1
    raised(
        lambda: dist_checkpointing.save(
            {"w": without_data(last)}, context.folder / "c", async_sharded_save=True
        ),
        "no data",
    )
