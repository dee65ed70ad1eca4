"""What stock's async_save is given for one save of ours: a stager around the real one."""

from __future__ import annotations

import contextlib
import functools
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from torch_ckpt.dcp.async_saves import AsyncSave
from torch_ckpt.dcp.items import PLAIN_TENSORS
from torch_ckpt.dcp.staged_state import StagedState
from torch_ckpt.dcp.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import CheckpointError, ExhaustedError, with_rank


class OneSaveStager(AsyncStager):
    """`inner` for one save.

    - The state does not pass through stock's call, which takes 18 us for each entry of it to write
      to a log that nobody reads (2.13).
    - Stock's thread gets the state through a future. It is done when the copy is, when all saves of
      `earlier` are over, since they use the same process group, and when stock's call has returned:
      the thread plans in Python, and its caller would wait for the interpreter.
    - A state for which a stager with over_budget="stream" has no memory is not copied: stock's
      thread saves the trainer's own tensors, which must not change until the writer has them.
    - A state that cannot be staged fails the save where other ranks hear of it: this rank takes
      part, with an empty state, until its planner refuses.
    - The lease of what was staged ends with the save. Without `end` it would end when the state is
      garbage: an error that somebody keeps has frames in its traceback that hold the state, and so
      has the future of a save while it is being set.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        inner: AsyncStager,
        writer: Any,
        planner: SavePlanner,
        save: AsyncSave,
        earlier: list[AsyncSave],
        *,
        crosses: bool,
    ) -> None:
        self._state_dict = state_dict
        self._inner = inner
        self._writer = writer
        self._planner = planner
        self._save = save
        self._earlier = earlier
        self._can_stream = getattr(inner, "over_budget", "") == "stream" and not crosses
        self._ready: Future[Any] | None = Future()
        self._staged: Any = None
        self._saved: Any = None  # what is to be saved, until stock's thread may have it
        self.blocks = True  # as opposed to staging beside the trainer
        self._refused = False
        self.error: BaseException | None = None  # that `stage` would have raised

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False  # stock asks only stagers that return no future; see `after_execute`

    def stage(self, _: dict[str, Any]) -> Future[Any]:
        """Stage the state that this object was made with."""
        ready = self._ready
        assert ready is not None  # stage is called once
        self._began = time.perf_counter()
        state_dict, self._state_dict = self._state_dict, {}
        try:
            state_dict = _without_statefuls(state_dict)
            staged = self._inner.stage(state_dict)
        except BaseException as error:  # Ctrl-C as well
            self._saved = self._lack(error, state_dict)
            if self._refused:
                self.error = error
            return ready
        if isinstance(staged, Future):
            self.blocks = False
            staged.add_done_callback(lambda done: self._take(done, state_dict))
        else:
            self._saved = self._have(staged)
        return ready

    def after_execute(self) -> None:
        """Stock's call has returned. Let its thread go on, and wait until the tensors may change,
        unless the stager stages beside the trainer."""
        if not self.blocks:
            return
        saved, self._saved = self._saved, None
        self._release_after(self._earlier, saved)
        if self.error is not None:
            return
        if self._staged is not None and self._inner.should_synchronize_after_execute:
            self._inner.synchronize_staging()
        self._save.staging_completion.result()

    def synchronize_staging(self) -> None:
        self._save.staging_completion.result()

    def close(self) -> None:
        self._inner.close()

    def _take(self, staged: Future[Any], state_dict: dict[str, Any]) -> None:
        try:
            saved = self._have(staged.result())
        except BaseException as error:
            saved = self._lack(error, state_dict)
        self._release_after(self._earlier, saved)

    def _have(self, state: Any) -> Any:
        """`state` is a copy. What is to be saved."""
        stats = self._save.stats
        stats.staged_s = time.perf_counter() - self._began
        if isinstance(state, StagedState):
            stats.staged_bytes = state.staged_bytes
        self._staged = state
        self._save.release_tensors()
        return state

    def _lack(self, error: BaseException, state_dict: dict[str, Any]) -> dict[str, Any]:
        """There is no copy. What is to be saved."""
        if isinstance(error, ExhaustedError) and self._can_stream:
            # By writers that do not say when they have written, until the save is over.
            if isinstance(self._writer, HuggingFaceStorageWriter):
                self._writer._when_written = self._save.release_tensors
            return state_dict
        self._refused = True
        rank = self._save.stats.rank
        known = with_rank(error, rank)
        if not isinstance(known, CheckpointError | OSError):
            # Only what certainly can be pickled crosses to another process, or to other ranks.
            known = CheckpointError(f"{type(error).__name__}: {error}", rank=rank)
        self._planner.set_up_planner = functools.partial(_refuse, known)  # type: ignore[method-assign]
        self._save.release_tensors(error)
        return {}

    def _release_after(self, earlier: list[AsyncSave], state: Any) -> None:
        """Let stock's thread go on with `state` when all of `earlier` are over."""
        if earlier:
            rest = earlier[1:]
            earlier[0].add_done_callback(lambda _: self._release_after(rest, state))
            return
        ready, self._ready = self._ready, None
        assert ready is not None
        ready.set_result(state)

    def give_up(self, error: BaseException) -> None:
        """Stock's call has failed: so does its thread, if there is one."""
        self._saved = None
        with contextlib.suppress(InvalidStateError):
            if self._ready is not None:
                self._ready.set_exception(error)

    def end(self) -> None:
        """The save is over."""
        if self._refused:
            self._planner.__dict__.pop("set_up_planner", None)
        if isinstance(self._writer, HuggingFaceStorageWriter):
            self._writer._when_written = None
        staged, self._staged = self._staged, None
        if isinstance(staged, StagedState):
            staged.end()


def _without_statefuls(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`, with the states of those entries that have one, as stock takes them."""
    return {
        # Asking a protocol takes longer than staging a small tensor.
        key: value.state_dict()
        if type(value) not in PLAIN_TENSORS and isinstance(value, Stateful)
        else value
        for key, value in state_dict.items()
    }


def _refuse(
    error: BaseException, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
) -> None:
    """In the place of a planner's set_up_planner."""
    raise error
