"""The life of a save in the background, from its staging to the end of its future."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager

from torch_ckpt.calls.futures import RunningSave, warn
from torch_ckpt.calls.process import SavingProcess
from torch_ckpt.calls.save import Save, SavedMetadata, SaveStats
from torch_ckpt.calls.turn import Turn
from torch_ckpt.errors import CheckpointError, ExhaustedError, forget_frames, with_rank
from torch_ckpt.native.jobs import in_thread
from torch_ckpt.planning.states import states_of
from torch_ckpt.staging import crossing
from torch_ckpt.staging.staged_state import StagedState


def heard_from(error: BaseException, stats: SaveStats) -> Exception:
    """What the future of a save raises: who waits for it was not interrupted."""
    if isinstance(error, Exception):
        return error
    text = f"{type(error).__name__}: {error}"
    heard = CheckpointError(text, file=stats.path, rank=stats.rank)
    heard.__cause__ = error
    return heard


class Background:
    """A save from its staging to the end of its future.

    - The thread that saves waits for the copy, until the call has returned (it plans in Python, and
      its caller would wait for the interpreter), and until all earlier saves are over.
    - A state for which a stager with over_budget="stream" has no memory is not copied: the
      trainer's own tensors are saved, which must not change until the writer has them.
    - A state that cannot be staged is an error of the save, of which all ranks hear.
    - `process`, if given, finds or starts the process that saves: in the thread, since a new one
      takes seconds, and in turn, since it ends one that is dead on another rank.
    - The lease of what was staged ends with the save. Else it would end when the state is garbage:
      an error that somebody keeps has frames in its traceback that hold the state.
    """

    def __init__(
        self,
        running: RunningSave,
        save: Save,
        stager: AsyncStager,
        turn: Turn,
        process: Callable[[], SavingProcess] | None,
        on_commit: Callable[[], None] | None,
    ) -> None:
        self._running = running
        self._save = save
        self._stager = stager
        self._turn = turn
        self._process = process
        self._on_commit = on_commit
        save.on_written = running.release_tensors
        # One state in a list, whose taker has it alone; or why there is none. The first counts.
        self._offered: Future[list[dict[str, Any]]] = Future()
        self._staged: StagedState | None = None  # that state, if it is a copy of ours
        self._returned = threading.Event()  # the call has
        self._runs = [self._save_and_finish]  # until somebody does
        self._blocks = True  # as opposed to staging beside the trainer

    @property
    def refusal(self) -> BaseException | None:
        """Why there is no state to be saved, where that is known."""
        return self._offered.exception() if self._offered.done() else None

    def start(self) -> None:
        """Let the thread wait for the state."""
        in_thread(self._run, "torch_ckpt-save")

    def stage(self, state_dict: Any) -> None:
        """Stage the state, or let a stager that does so beside the trainer begin."""
        state: dict[str, Any] = {}
        try:
            self._turn.wait()
            began = time.perf_counter()
            state = states_of(state_dict)
            staged = self._stager.stage(state)
            if isinstance(staged, Future):
                self._blocks = False
                staged.add_done_callback(lambda done: self._have(done.result, state, began))
                return
            if self._stager.should_synchronize_after_execute:
                self._stager.synchronize_staging()
        except BaseException as error:  # Ctrl-C as well
            failure = error
            self._have(lambda: _raise(failure), state, 0.0)
        else:
            self._have(lambda: staged, state, began)

    def _have(
        self, staged: Callable[[], dict[str, Any]], state: dict[str, Any], began: float
    ) -> None:
        """`staged` returns a copy of `state`, or raises why there is none."""
        try:
            copy = staged()
            stats = self._running.stats
            stats.staged_s = time.perf_counter() - began
            if isinstance(copy, StagedState):
                stats.staged_bytes = copy.staged_bytes
                self._staged = copy
                if self._process is not None:
                    crossing.pack(copy)
        except BaseException as error:
            if self._streams(error):
                self._offer(state)
            else:
                self._refuse(error)
            return
        self._offer(copy)
        self._running.release_tensors()

    def _offer(self, state: dict[str, Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # `give_up` was here
            self._offered.set_result([state])

    def _streams(self, error: BaseException) -> bool:
        """Whether there is no copy and none is needed."""
        wanted = getattr(self._stager, "over_budget", "") == "stream"
        return wanted and self._process is None and isinstance(error, ExhaustedError)

    def _refuse(self, error: BaseException) -> bool:
        """There is no state. Whether there was none before."""
        known = with_rank(error, self._save.ranks.rank)
        try:
            self._offered.set_exception(known)
        except InvalidStateError:
            return False
        self._running.release_tensors(heard_from(known, self._running.stats))
        return True

    def let_go(self) -> None:
        """The call returns: let the thread go on, and wait until the tensors may change, unless the
        stager stages beside the trainer."""
        self._running.stats.blocked_s = self._running.elapsed()
        self._returned.set()
        if self._blocks and self.refusal is None:
            self._running.future.staging_completion.result()
            self._running.stats.blocked_s = self._running.elapsed()

    def give_up(self, error: BaseException) -> bool:
        """The call ends with `error`. Whether that came in time: then the save fails with it."""
        in_time = self._refuse(error)
        self._returned.set()
        if in_time:
            self._run()  # where no thread could be had: or other ranks would not hear of it
        return in_time

    def _take(self) -> dict[str, Any]:
        return self._offered.result().pop()

    def _run_there(self, process: SavingProcess) -> Metadata:
        with contextlib.ExitStack() as stack:
            try:
                save = stack.enter_context(self._save.portable())
            except Exception as error:
                failure = error  # of which the other ranks hear there
                return process.run(self._save, lambda: _raise(failure))
            return process.run(save, self._take)

    def _run(self) -> None:
        """Once, by whoever comes first: the thread, or the caller where there is none."""
        try:
            run = self._runs.pop()
        except IndexError:
            return
        try:
            run()
        finally:
            del run, self  # as in `_save_and_finish`

    def _save_and_finish(self) -> None:
        saved: list[Metadata] = []
        error = _raised_by(self._saved, saved)
        after = _raised_by(self._ended, saved)  # or nobody would ever hear
        if error is None:
            error = after
        metadata = None if error is not None else saved[0]
        self._save.on_written = None  # which the future has
        try:
            self._running.finish(
                metadata, None if error is None else heard_from(error, self._running.stats)
            )
        finally:
            del self, error, after  # the frames of an error know who has called them

    def _saved(self, saved: list[Metadata]) -> None:
        wait([self._offered])
        self._returned.wait()
        wait([save.future for save in self._turn.running])
        if self._process is None:
            saved.append(self._save.run(self._take))
        else:
            saved.append(self._run_there(self._process()))

    def _ended(self, saved: list[Metadata]) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            try:
                staged.end()
            except Exception as failure:  # which undoes no commit
                warn(f"a staged state keeps its memory until its tensors are gone: {failure}")
        if saved:
            saved[0] = SavedMetadata(saved[0], self._running.stats)
            if self._on_commit is not None:
                self._on_commit()


def _raise(error: BaseException) -> Any:
    raise error


def _raised_by(
    step: Callable[[list[Metadata]], None], saved: list[Metadata]
) -> BaseException | None:
    """What `step` raises, which the future has from then on: without what its frames hold."""
    try:
        step(saved)
    except BaseException as error:
        forget_frames(error)
        return error
    finally:
        del step
    return None
