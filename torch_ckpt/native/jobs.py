"""Native jobs: ids on the inside, context managers on the outside; and threads to run them in.

A native id never enters pickled state, and a leaked owner frees what it holds.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from torch_ckpt.errors import (
    CheckpointError,
    error_from,
)
from torch_ckpt.native import core

T = TypeVar("T")

# Threads of a native call at the least, whatever the caller asks for: a worker that waits for the
# disk costs no CPU, and with fewer than this the disk waits for copies. Loads and saves have more
# where few ranks share a node (dcp/node.py).
MIN_WORKERS = 4


_local = threading.local()  # caller: the thread for which `apart` has made this one


def apart(
    work: Callable[[], Any], interrupted: Callable[[], None], undo: Callable[[Any], None]
) -> Any:
    """What `work`, a blocking native call, returns; where this is the main thread it is called on
    another one, but at the end of the interpreter, when there may be no other ones any more.

    On the main thread it would put Ctrl-C off to its end and then lose what it made. Here Ctrl-C
    calls `interrupted`, waits for the end of `work`, gives what that returned to `undo`, and is
    raised.
    """
    if threading.current_thread() is not threading.main_thread() or at_exit():
        return work()
    outcome: dict[str, Any] = {}
    ended = threading.Event()
    caller = threading.current_thread()

    def call() -> None:
        _local.caller = caller
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error
        finally:
            ended.set()

    thread = threading.Thread(target=call, name="torch_ckpt-job", daemon=True)
    interrupt: BaseException | None = None
    begun = False
    while not ended.is_set():
        try:
            if not begun:
                begun = True
                thread.start()
            elif not ended.wait(_LOOK_S) and interrupt is not None and thread.ident is None:
                break  # interrupted before there was a thread, or none is to be had
        except BaseException as error:
            if interrupt is None:
                interrupt = error
                interrupted()
    if interrupt is not None and "value" in outcome:
        undo(outcome["value"])
    try:
        if interrupt is not None:
            raise interrupt
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]
    finally:
        outcome.clear()  # or the error would find itself in this frame
        del interrupt


_LOOK_S = 5.0


def caller() -> threading.Thread:
    """The thread that runs this code, or the one that waits in `apart` for it."""
    thread: threading.Thread = getattr(_local, "caller", threading.current_thread())
    return thread


def at_exit() -> bool:
    """Whether the main thread has come to its end, and only atexit's functions are called in it:
    Python 3.12 starts no thread for them."""
    return not threading.main_thread().is_alive()


def in_thread(work: Callable[[], T], name: str, done: Future[T] | None = None) -> Future[T]:
    """Call `work` in a thread of its own, which the interpreter waits for at its end, and give its
    outcome to `done`, or to a new future. Not an executor's thread: those take nothing any more
    when the interpreter begins to end."""
    done = Future() if done is None else done
    threading.Thread(target=_give, args=(work, done), name=name).start()
    return done


def _give(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    finally:
        del work, done  # or the error would find itself in this frame


class Job:
    """A piece of native work: progress, cancellation, first error and result.

    Use as a context manager. All methods may be called from any thread while the work runs in
    another.
    """

    def __init__(self) -> None:
        self.id: int = core.call({"op": "job_create"})["job"]
        self._finalizer = finalizer(self, _free_job, self.id)
        self._jobs = _jobs.get()
        if self._jobs is not None:
            self._jobs._add(self)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._jobs is not None:
            self._jobs._remove(self)
        self._finalizer()

    def __reduce__(self) -> Any:
        raise TypeError("a native job cannot be pickled")

    def _poll(self) -> dict[str, Any]:
        state: dict[str, Any] = core.call({"op": "job_poll", "job": self.id})
        return state

    def progress(self) -> tuple[int, int]:
        """(bytes done, bytes in all); the second is 0 before planning is through."""
        state = self._poll()
        return state["done"], state["total"]

    def cancel(self) -> None:
        """Ask the job to stop; its call then raises CancelledError."""
        core.call({"op": "job_cancel", "job": self.id})

    def is_cancelled(self) -> bool:
        """Whether somebody has asked it to stop, for work that no native call does."""
        return bool(self._poll()["cancelled"])

    def error(self) -> CheckpointError | OSError | None:
        """What the job failed with, or None."""
        fields = self._poll()["error"]
        return None if fields is None else error_from(fields)

    def result(self) -> Any:
        """What the op behind the job returned."""
        return self._poll()["result"]

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work`, a blocking native call under this job.

        On the main thread it runs on another one, so that Ctrl-C cancels it instead of waiting.
        """
        return apart(work, self.cancel, lambda _: None)


class Jobs:
    """The jobs that are made in a block of code, by the thread that runs it: they are cancelled
    and counted together. Use as a context manager; a block inside another one has its own jobs.
    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: list[Job] = []
        self._ended = (0, 0)  # bytes done and in all, of jobs that have ended
        self._cancelled = False
        self._tokens: list[contextvars.Token[Jobs | None]] = []

    def __enter__(self) -> Jobs:
        self._tokens.append(_jobs.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _jobs.reset(self._tokens.pop())

    def cancel(self) -> None:
        """Cancel the jobs that run, and those to come."""
        with self._mutex:
            self._cancelled = True
            for job in self._running:
                job.cancel()

    def progress(self) -> tuple[int, int]:
        """Bytes done and bytes in all, of all jobs so far."""
        with self._mutex:
            counts = [self._ended, *(job.progress() for job in self._running)]
        return sum(done for done, _ in counts), sum(total for _, total in counts)

    def _add(self, job: Job) -> None:
        with self._mutex:
            self._running.append(job)
            if self._cancelled:
                job.cancel()

    def _remove(self, job: Job) -> None:
        with self._mutex:
            done, total = job.progress()
            self._ended = (self._ended[0] + done, self._ended[1] + total)
            self._running.remove(job)


_jobs: contextvars.ContextVar[Jobs | None] = contextvars.ContextVar("torch_ckpt", default=None)


def finalizer(owner: object, free: Callable[..., None], *what: Any) -> Any:
    """Calls free(*what) when `owner` is garbage, but for copies of it in forked children: what they
    refer to is the parent's."""
    pid = os.getpid()

    def in_this_process() -> None:
        if os.getpid() == pid:
            free(*what)

    finalizer = weakref.finalize(owner, in_this_process)
    finalizer.atexit = False
    return finalizer


def _free_job(job: int) -> None:
    core.call({"op": "job_free", "job": job})
