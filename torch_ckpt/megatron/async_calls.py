"""Saves in the background, as Megatron's training loop runs them: scheduled, polled, finalized."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_ckpt.megatron.config import CheckpointingException, as_megatron_says
from torch_ckpt.native.jobs import in_thread
from torch_ckpt.native.torch_private import store_of
from torch_ckpt.ranks import Ranks

_OTHERS = ("megatron.core.dist_checkpointing.", "nvidia_resiliency_ext.")
_OTHER_QUEUE = (
    "a save of torch_ckpt runs in the process that has the tensors: schedule its request with an "
    "AsyncCallsQueue of torch_ckpt.megatron.dist_checkpointing.strategies.async_utils"
)
_queues = itertools.count()  # all ranks make them in one order


class StartableSave:
    """The async_fn of a request that `save` has made. A call runs the save; `start` begins it in
    the background, and returns its future when the tensors may change.

    A queue of another package would run it in a process of its own, and finalize what failed there:
    so `committed` is the first function of the request, and raises where no save of this process
    has been committed.
    """

    def __init__(self, start: Callable[[], Future[Any]]) -> None:
        self._start = start
        self._future: Future[Any] | None = None
        self._pid = os.getpid()

    def start(self) -> Future[Any]:
        if os.getpid() != self._pid:
            raise CheckpointingException(_OTHER_QUEUE)
        self._future = self._start()
        return self._future

    def __call__(self) -> None:
        with as_megatron_says():
            self.start().result()

    def committed(self) -> None:
        if self._future is None or os.getpid() != self._pid:
            raise CheckpointingException(_OTHER_QUEUE)
        with as_megatron_says():
            self._future.result()

    def __reduce__(self) -> Any:
        # A queue that pickles would lose the error, and wait for ever: the process that it has
        # started does nothing instead, and `committed` tells why.
        return functools.partial, (_nothing,)


def _nothing() -> None:
    """What a save of this process is in another one."""


class AsyncRequest(NamedTuple):
    """A save that is prepared, and what is to be done when it is committed.

    async_fn: what a queue runs in the background with the arguments, None for nothing.
    async_fn_args, async_fn_kwargs: the arguments, by place and by name.
    finalize_fns: called in this order on every rank, at the same poll, after that.
    preload_fn: if given, what it returns when the request is scheduled is the second argument.
    is_frozen: no more functions are added.
    call_idx: its number, as scheduled.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call `fn` after those that are there. Raises RuntimeError when it is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen: it takes no more functions")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it now. A collective call. Raises what `async_fn` and the functions do."""
        if isinstance(self.async_fn, StartableSave):
            self.async_fn()
        elif self.async_fn is not None:  # its error on one rank is that of all
            Ranks.of(None).together("a call of the application", self._call)
        Ranks.of(None).together("finalizing a save", lambda: None)
        for finalize in self.finalize_fns:
            finalize()

    def _call(self) -> None:
        assert self.async_fn is not None
        self.async_fn(*_arguments(self), **self.async_fn_kwargs)

    def freeze(self) -> AsyncRequest:
        """The same, frozen."""
        return self._replace(is_frozen=True)


def _arguments(request: Any) -> list[Any]:
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    return arguments


class _Call:
    """A request that is under way. told: whether the store has been told that it is over here."""

    def __init__(self, number: int, request: Any, future: Future[Any]) -> None:
        self.number = number
        self.request = request
        self.future = future
        self.is_ours = isinstance(request.async_fn, StartableSave)
        self.told = False


class AsyncCallsQueue:
    """Requests under way, which are finalized in their order.

    All ranks make the same calls: they schedule, poll and close together. No poll is a collective:
    the first rank that comes to it says in the process group's store which calls are over, and all
    finalize those there. Functions may hold barriers, and a rank that waits in one while the others
    train would never be met.

    persistent, cpu_shm_mode, is_daemon: do nothing, as what else is given: no process is started.
        Megatron looks some of them up in the signature.
    """

    def __init__(
        self,
        persistent: bool = False,
        cpu_shm_mode: bool = False,
        is_daemon: bool = True,
        **_: Any,
    ) -> None:
        self.persistent = persistent
        self._calls: deque[_Call] = deque()
        self._numbers = itertools.count()
        self._polls = 0
        self._name = f"torch_ckpt/async_calls/{next(_queues)}"

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        mp_mode: str = "spawn",
        cpu_priority: int = 10,
        io_priority: int | None = None,
        cpu_shm_mode: bool = False,
        is_daemon: bool = True,
        **_: Any,
    ) -> None:
        """Does nothing: there is no process to start."""

    def schedule_async_request(self, async_request: Any) -> int:
        """Begin it; when this returns, tensors may change. Returns its number. A collective call.

        Raises TypeError for what is no request, and for one of another checkpoint package's, which
        would start processes; what staging a save raises, on the rank where it does;
        CheckpointingException, on all ranks, for an earlier save that failed and that no poll has
        told of yet. What `preload_fn` raises is an error of the call, which polls tell.
        """
        fields = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn")
        if any(not hasattr(async_request, name) for name in fields):
            raise TypeError(f"a {type(async_request).__qualname__} is no AsyncRequest")
        made_by = _module_of(async_request.async_fn)
        if made_by.startswith(_OTHERS):
            raise TypeError(f"the request is of {made_by}: make it by the save of torch_ckpt")
        number = next(self._numbers)
        request = async_request._replace(is_frozen=True, call_idx=number)
        self._calls.append(_Call(number, request, _begun(request)))
        return number

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the calls that are over, in their order; their numbers. A poll: it does not
        wait, and is no collective, but all ranks make it.

        blocking: wait for all that are under way.
        no_dist: go by this rank alone.

        Raises CheckpointingException or OSError of a save that failed, on all ranks at the same
        poll, and so for what a call of the application's own raised on any; the functions of that
        call are not called.
        """
        if blocking:
            last = self._calls[-1].number if self._calls else -1
        elif no_dist or not dist.is_initialized() or dist.get_world_size() == 1:
            last = self._over()
        else:
            last = self._agreed()
        finalized = []
        while self._calls and self._calls[0].number <= last:
            call = self._calls.popleft()
            with as_megatron_says():
                if call.is_ours or no_dist:
                    call.future.result()
                else:  # its error on one rank is that of all
                    what = f"call {call.number} of the application"
                    Ranks.of(None).together(what, functools.partial(_wait_for, call.future))
            for finalize in call.request.finalize_fns:
                finalize()
            finalized.append(call.number)
        return finalized

    def _over(self) -> int:
        """The last of the calls that are over here, with all before it."""
        last = -1
        for call in self._calls:
            if not call.future.done():
                break
            last = call.number
        return last

    def _agreed(self) -> int:
        """The last of the calls that all ranks finalize at this poll."""
        self._polls += 1  # here, as one rank may look at its own without the others
        if not self._calls:
            return -1
        store = store_of(dist.group.WORLD)
        for call in self._calls:
            if not call.is_ours and call.future.done() and not call.told:
                call.told = True
                store.add(f"{self._name}/{call.number}", 1)
        # Ranks come to a poll in any order, and may be polls apart: the first says it for all.
        key = f"{self._name}/at/{self._polls}"
        last = int(store.compare_set(key, "", str(self._over_everywhere(store))))
        if store.add(f"{key}/read", 1) == dist.get_world_size():
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        return last

    def _over_everywhere(self, store: Any) -> int:
        """As `_over`, for all ranks. A save of ours is over where it is committed, or has failed;
        of the application's own calls each rank tells."""
        last = -1
        for call in self._calls:
            if not call.future.done():
                break
            if not call.is_ours:
                told = store.add(f"{self._name}/{call.number}", 0)
                if told < dist.get_world_size():
                    break
            last = call.number
        return last

    def get_num_unfinalized_calls(self) -> int:
        """How many requests were scheduled and are not finalized yet."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls. With `abort` none is: saves end, and what they would have replaced
        stays, unless they are committed already; the application's own calls are waited for. Raises
        what `maybe_finalize_async_calls` does, with `abort` nothing."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
            return
        for call in self._calls:
            if call.is_ours:
                call.future.cancel()
        while self._calls:
            self._calls.popleft().future.exception()


def _wait_for(future: Future[Any]) -> None:
    """Raises what it does. Its result is nobody's, and is not sent to the others."""
    future.result()


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def _begun(request: Any) -> Future[Any]:
    if isinstance(request.async_fn, StartableSave):
        with as_megatron_says():
            return request.async_fn.start()
    done: Future[Any] = Future()
    if request.async_fn is None:
        done.set_result(None)
        return done
    try:
        arguments = _arguments(request)
    except Exception as error:
        done.set_exception(error)
        return done
    return in_thread(
        lambda: request.async_fn(*arguments, **request.async_fn_kwargs), "torch_ckpt-async-call"
    )


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Does nothing: writers are threads, and need no queue between processes."""


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> Any:
    """What `get_async_strategy` gives: the name, and the objects or the one named `module`. Raises
    TypeError for another strategy, KeyError for another name."""
    check_async_strategy(async_strategy)
    objects = {
        "AsyncCallsQueue": AsyncCallsQueue,
        "AsyncRequest": AsyncRequest,
        "get_write_results_queue": get_write_results_queue,
    }
    return async_strategy, objects if module is None else objects[module]


def check_async_strategy(async_strategy: str) -> None:
    if async_strategy not in ("nvrx", "mcore"):
        raise TypeError(
            f'async_strategy is "nvrx" or "mcore", not {async_strategy!r}: both are ours'
        )
