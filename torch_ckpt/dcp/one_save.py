"""What stock's async_save is given for one save of ours: a stager around the real one."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from torch_ckpt.dcp import crossing
from torch_ckpt.dcp.async_saves import AsyncSave, Turn
from torch_ckpt.dcp.staged_state import StagedState
from torch_ckpt.dcp.whole_state import Unwrapping, whole_state, without_statefuls
from torch_ckpt.dcp.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import CheckpointError, ExhaustedError, with_rank


class OneSaveStager(AsyncStager):
    """`inner` for one save.

    - The state does not pass through stock's call: see `whole_state`.
    - Stock's thread gets the state through a future. It is done when the copy is, when all earlier
      saves are over, since they use the same process group, and when stock's call has returned:
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
        turn: Turn,
        *,
        crosses: bool,
    ) -> None:
        self._state_dict = state_dict
        self._inner = inner
        self._writer = writer
        self._unwrapping = Unwrapping(planner)
        self._save = save
        self._turn = turn
        self._crosses = crosses
        self._saved: dict[str, Any] = {}  # what is to be saved
        self._refusal: BaseException | None = None  # why nothing is
        self._staged: Any = None  # that, if it is a copy
        # What stock's thread waits for: earlier saves by their ids, and these two.
        self._missing: set[Any] = {"state", "call", *map(id, turn.earlier)}
        self._mutex = threading.Lock()
        self._ready: Future[Any] = Future()
        self.blocks = True  # as opposed to staging beside the trainer
        self.error: BaseException | None = None  # that `stage` would have raised

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False  # stock asks only stagers that return no future

    def stage(self, _: dict[str, Any]) -> Future[Any]:
        """Stage the state that this object was made with."""
        state_dict, self._state_dict = self._state_dict, {}
        try:
            self._turn.wait()
            self._began = time.perf_counter()
            state_dict = without_statefuls(state_dict)
            staged = self._inner.stage(state_dict)
            if isinstance(staged, Future):
                self.blocks = False
                self._state_dict = state_dict
                staged.add_done_callback(self._take)
                return self._ready
            if self._inner.should_synchronize_after_execute:
                self._inner.synchronize_staging()
            self._have(staged)
        except BaseException as error:  # Ctrl-C as well
            if not self._streams(error, state_dict):
                self._refuse(error)
                self.error = error
        self._arrived("state")
        return self._ready

    def after_execute(self) -> None:
        """Stock's call has returned. Let its thread go on, and wait until the tensors may change,
        unless the stager stages beside the trainer."""
        self._save.stats.blocked_s = self._save.elapsed()
        # Futures keep their callbacks, and this object has the state: the thread that waits for it
        # is what keeps it.
        arrived = weakref.WeakMethod(self._arrived)

        def over(earlier: Future[Any]) -> None:
            call = arrived()
            if call is not None:
                call(id(earlier))

        for earlier in self._turn.earlier:
            earlier.add_done_callback(over)
        self._arrived("call")
        if self.blocks and self.error is None:
            self._save.staging_completion.result()
            self._save.stats.blocked_s = self._save.elapsed()

    def synchronize_staging(self) -> None:
        self._save.staging_completion.result()

    def close(self) -> None:
        self._inner.close()

    def _take(self, staged: Future[Any]) -> None:
        state_dict, self._state_dict = self._state_dict, {}
        try:
            self._have(staged.result())
        except BaseException as error:
            if not self._streams(error, state_dict):
                self._refuse(error)
        self._arrived("state")

    def _have(self, state: Any) -> None:
        """`state` is a copy."""
        stats = self._save.stats
        stats.staged_s = time.perf_counter() - self._began
        self._saved = self._staged = state
        if isinstance(state, StagedState):
            stats.staged_bytes = state.staged_bytes
            if self._crosses:
                crossing.pack(state)
        self._save.release_tensors()

    def _streams(self, error: BaseException, state_dict: dict[str, Any]) -> bool:
        """Whether there is no copy and none is needed."""
        wanted = getattr(self._inner, "over_budget", "") == "stream"
        if not wanted or self._crosses or not isinstance(error, ExhaustedError):
            return False
        # By writers that do not say when they have written, until the save is over.
        if isinstance(self._writer, HuggingFaceStorageWriter):
            self._writer._when_written = self._save.release_tensors
        self._saved = state_dict
        return True

    def _refuse(self, error: BaseException) -> None:
        """There is no copy, and that fails the save of all ranks."""
        rank = self._save.stats.rank
        known: Any = with_rank(error, rank)
        if not isinstance(known, CheckpointError | OSError):
            # Only what certainly can be pickled crosses to another process, or to other ranks.
            known = CheckpointError(f"{type(error).__name__}: {error}", rank=rank)
        self._saved, self._refusal = {}, known
        self._save.release_tensors(known)

    def _arrived(self, what: Any) -> None:
        with self._mutex:
            self._missing.discard(what)
            if self._missing:
                return
        saved, self._saved = self._saved, {}
        try:
            self._ready.set_result(whole_state(saved, self._refusal))
        except InvalidStateError:
            return  # `give_up` was here

    def give_up(self, error: BaseException) -> bool:
        """Stock's call has not returned as it should. Whether its thread, if there is one, gets no
        state any more and ends with `error`."""
        try:
            # Stock's callbacks catch no more than Exceptions, and so do those of futures.
            text = f"{type(error).__name__}: {error}"
            told = error if isinstance(error, Exception) else CheckpointError(text)
            self._ready.set_exception(told)
        except InvalidStateError:
            return False
        return True

    def end(self) -> None:
        """The save is over. Once more is fine."""
        self._unwrapping.end()
        if isinstance(self._writer, HuggingFaceStorageWriter):
            self._writer._when_written = None
        staged, self._staged, self._saved = self._staged, None, {}
        if isinstance(staged, StagedState):
            staged.end()
