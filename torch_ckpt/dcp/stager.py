"""PinnedMemoryStager: DCP's AsyncStager protocol on the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from torch.distributed.checkpoint.staging import AsyncStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core, operators
from torch_ckpt.options import parse_bytes
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.staging import crossing
from torch_ckpt.staging.sources import queued_kernels, wait_for
from torch_ckpt.staging.staged_state import StateCopy

# More threads than this do not copy faster: memory is the limit.
_MAX_WORKERS = 8

# Each waits, for so many seconds at most, until saves of this process are over. There is one for
# those of `torch_ckpt.async_save`, from calls/futures.py, as soon as that is imported.
saves_beside: list[Callable[[float], None]] = []


class PinnedMemoryStager(AsyncStager):
    """Copies state dicts into the process's host arena, for `dcp.async_save`.

    config: stock's StagingOptions; without one `stage` returns when the tensors may change. Not so
        with `use_async_staging`, stock's default: it makes `stage` return a Future, and the copy
        goes on while the trainer does, which must not change its tensors before that is done.
        `use_pinned_memory` and `use_non_blocking_copy` change nothing: memory that a device copies
        into is always page-locked, and the copies of all tensors run at once. `use_shared_memory`
        neither, but see `async_checkpointer_type`.
    memory_budget: bytes (or text as "2GiB") that all staged states of this process may take
        together. The latest stager that was given one decides; without, there is no limit.
    prepare: bytes (or text as "2GiB"), or a state dict of the size to come: memory for it is made
        in the background now. The first touch of memory can take longer than writing it to a disk;
        without this the first state that is staged waits for it.
    async_checkpointer_type: what the saves will be given. From the first stager or save with
        AsyncCheckpointerType.PROCESS on, states of this process are staged into memory that the
        other process maps, and nothing is copied again. Where only the save says so, what was
        prepared before cannot be used, and bare `dcp.async_save` copies the first state once more.
    over_budget: what to do with a state for which there is no memory now. "wait" for states that
        have it, and raise ExhaustedError if that cannot help; "raise" it at once; or "stream", with
        `torch_ckpt.async_save` alone: the state is not copied but written from where it is, and the
        trainer waits for the disk, not for the memory.
    timeout: seconds to wait.

    A staged state's memory is leased until the state and its last tensor are gone, and never reused
    before (`torch_ckpt.async_save` ends the lease when the save is over); memory that came back is
    used again, without allocation, by the next state. One stager serves any number of saves; so do
    many, since the memory is the process's.

    Raises, from `stage` or its future: InvalidArgumentError and UnsupportedError naming the leaf,
    ExhaustedError where memory stays taken.
    """

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        memory_budget: int | str | None = None,
        prepare: int | str | dict[str, Any] | None = None,
        async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        over_budget: Literal["wait", "raise", "stream"] = "wait",
        timeout: float = 600.0,
    ) -> None:
        if over_budget not in ("wait", "raise", "stream"):
            raise InvalidArgumentError(f"over_budget={over_budget!r}")
        self.over_budget = over_budget
        self.config = StagingOptions(False, False, False, False) if config is None else config
        if not timeout >= 0:
            raise InvalidArgumentError(f"a timeout of {timeout} seconds")
        if memory_budget is not None:
            budget = parse_bytes(memory_budget, "memory_budget")
            core.call({"op": "arena", "snapshots": True, "budget": budget})
        self.timeout = timeout
        if async_checkpointer_type is AsyncCheckpointerType.PROCESS:
            crossing.expect()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._running: Future[dict[str, Any]] | None = None
        self._preparing: Future[Any] | None = None
        if prepare is not None:
            if isinstance(prepare, dict):
                size = sum(tensor.nbytes for tensor in StateCopy(prepare).tensors) or 1
            else:
                size = parse_bytes(prepare, "prepare")
            shared = crossing.is_expected()
            request = {"op": "arena", "snapshots": True, "prepare": size, "shared": shared}
            request["workers"] = min(_MAX_WORKERS, os.cpu_count() or 1)
            self._preparing = self._thread().submit(core.call, request)

    def __getstate__(self) -> dict[str, Any]:
        # Threads do not cross to other processes; a config does.
        return {**self.__dict__, "_executor": None, "_running": None, "_preparing": None}

    def _thread(self) -> ThreadPoolExecutor:
        """One thread, which does one thing after another. A forked child has its own."""
        if self._executor is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch_ckpt-stage")
        return self._executor

    def stage(
        self, state_dict: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of `state_dict` that later changes do not reach."""
        with paused_gc(keeps=True):
            state = StateCopy(state_dict)
            events = queued_kernels(state.tensors)
            if not self.config.use_async_staging:
                return self._copy(state, events)
        running = self._thread().submit(self._copy, state, events)
        self._running = running
        running.add_done_callback(self._forget)
        return running

    def _forget(self, done: Future[dict[str, Any]]) -> None:
        # Or the future would keep the state's memory until the next one is staged.
        if self._running is done and not done.cancelled() and done.exception() is None:
            self._running = None

    def _copy(self, state: StateCopy, events: list[Any]) -> dict[str, Any]:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.result()  # else this state would take other memory
        wait_for(events)  # before anything can fail: a state that is streamed needs it as well
        staged, region = operators.stage(
            state.tensors,
            state.names,
            workers=min(_MAX_WORKERS, os.cpu_count() or 1),
            timeout=self.timeout if self.over_budget == "wait" else 0.0,
            shared=crossing.is_expected(),
        )
        return state.with_tensors(staged, region)

    def synchronize_staging(self) -> None:
        """Wait until the trainer may change its tensors again."""
        running = self._running
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait for what is being staged, let the thread go, and wait for the saves of this process
        that `torch_ckpt.async_save` began. What is staged stays; the stager may be used again.

        Raises CheckpointError if such a save has failed and nobody has heard of it, ConflictError
        if one is not over after `timeout` seconds.
        """
        executor, self._executor = self._executor, None
        preparing, self._preparing = self._preparing, None
        self._running = None
        if executor is not None:
            executor.shutdown()
        if preparing is not None:
            preparing.result()  # its error, if nobody has heard of it
        for close in saves_beside:
            close(self.timeout)
