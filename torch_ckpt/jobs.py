"""Owners of native jobs and save sessions: ids on the inside, context managers on the outside.

A native id never enters pickled state, and a leaked owner frees what it holds.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch_ckpt import _core
from torch_ckpt.errors import CheckpointError, IncompleteError, InvalidArgumentError, error_from
from torch_ckpt.options import local_path
from torch_ckpt.warn import warn

T = TypeVar("T")

# Threads of a native call at the least, whatever the caller asks for: a worker that waits for the
# disk costs no CPU, and with fewer than this the disk waits for copies. On 2 cores four wrote at
# 1.5 times the rate of two, and more gained nothing (python -m benchmarks save_llama).
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
        self.id: int = _core.call({"op": "job_create"})["job"]
        self._finalizer = _finalizer(self, _free_job, self.id)
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
        state: dict[str, Any] = _core.call({"op": "job_poll", "job": self.id})
        return state

    def progress(self) -> tuple[int, int]:
        """(bytes done, bytes in all); the second is 0 before planning is through."""
        state = self._poll()
        return state["done"], state["total"]

    def cancel(self) -> None:
        """Ask the job to stop; its call then raises CancelledError."""
        _core.call({"op": "job_cancel", "job": self.id})

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

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class OpenedCheckpoint:
    """A checkpoint directory, looked at once: what it holds stays what it was then, and a file
    that has been replaced since is an error.

    Its files are opened when they are first read. `close`, or garbage, ends it; jobs that use it
    go on. Raises what the core's "open" raises (csrc/engine/open/checkpoint.h).
    """

    path: str
    id: int
    notes: list[str]  # what is wrong and no error, of which users tell: `hulls.warn_of_notes`
    close: Callable[[], Any]

    def __init__(self, path: str, format: str | None = None) -> None:
        self.path = local_path(path)
        request = {"op": "open", "path": self.path}
        if format is not None:
            request["format"] = format
        try:
            answer = _core.call(request)
        except IncompleteError:
            if os.path.lexists(self.path) or not _HUB_ID.fullmatch(path):
                raise
            raise IncompleteError(
                "there is no such file or directory; for a model on the Hugging Face Hub, load "
                f"from huggingface_hub.snapshot_download({path!r})",
                file=self.path,
            ) from None
        self._take(answer["checkpoint"], answer["notes"])

    def _take(self, number: int, notes: list[str]) -> None:
        self.id, self.notes = number, notes
        self.close = _finalizer(self, _close_checkpoint, self.id)

    def __reduce__(self) -> Any:
        raise TypeError("an opened checkpoint cannot be pickled")

    def without(self, names: list[str]) -> OpenedCheckpoint:
        """The same look without these leaves, as if they were not there."""
        request = {"op": "without", "checkpoint": self.id, "names": _core.names_text(names)}
        left = object.__new__(OpenedCheckpoint)
        left.path = self.path
        left._take(_core.call(request)["checkpoint"], self.notes)
        return left

    @contextlib.contextmanager
    def files_open(self, direct_io: bool) -> Iterator[None]:
        """Within it each file is opened once, however many jobs with that `direct_io` read it."""
        request = {"op": "hold_files", "checkpoint": self.id, "direct_io": direct_io}
        files = _core.call(request)["files"]
        try:
            yield
        finally:
            _core.call({"op": "release_files", "files": files})

    def describe(self, *, whole: bool = False, tensors: bool = True) -> dict[str, Any]:
        """What it holds, as `_core.describe` says it."""
        return _core.describe({"checkpoint": self.id}, whole=whole, tensors=tensors)

    def archived_objects(self, names: list[str]) -> list[Any]:
        """Objects that `describe` calls archived, each as the parsed JSON of an objects file
        (docs/format.md, section 7), or as the error that names it. Nothing of a pickle is run."""
        answer = _core.call({"op": "read_objects", "checkpoint": self.id, "names": names})
        return [
            error_from(each["error"]) if "error" in each else json.loads(each["text"])
            for each in answer["objects"]
        ]

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor by its name, as safetensors calls it ("BF16")."""
        answer = self.describe()
        columns = zip(answer["names"], answer["kinds"], answer["type_of"], strict=True)
        types = answer["types"]
        return {name: types[at][0] for name, kind, at in columns if kind != _core.OBJECT}


def warn_of(answer: dict[str, Any]) -> None:
    """Warn of what the engine has found and given up while it did what `answer` tells. Called when
    all that must be kept of the answer is kept: where warnings are errors, the first one raises."""
    for text in answer.get("warnings", ()):
        warn(f"torch_ckpt: {text}")


class _Session:
    """A hold on a staging directory, from planning to the commit.

    DCP gives a writer no call when a save fails elsewhere. So a session remembers the thread that
    began it: that thread beginning another save, or being gone, means that this save is over.
    """

    _kind: str  # as the core's requests are named
    _open: dict[tuple[str, str], weakref.ref[_Session]] = {}
    _mutex = threading.Lock()

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path = path
        self._thread = getattr(_local, "caller", threading.current_thread())
        self.end_earlier(path)
        # Not under the lock: this is work on the disk, and others begin elsewhere.
        answer = apart(
            lambda: _core.call({"op": f"begin_{self._kind}", "path": path, **options}),
            lambda: None,
            lambda begun: end_session(self._kind, begun["session"]),
        )
        self.id: int = answer["session"]
        self.staging: str = answer["staging"]
        self.save_id: str = answer["save_id"]
        self._finalizer = _finalizer(self, end_session, self._kind, self.id)
        with _Session._mutex:
            _Session._open[self._kind, path] = weakref.ref(self)
        warn_of(answer)

    @classmethod
    def end_earlier(cls, path: str) -> None:
        """End what a save into `path` that is over has left open in this process."""
        with _Session._mutex:
            known = _Session._open.get((cls._kind, path))
            earlier = known() if known is not None else None
        if earlier is not None and earlier._is_over():
            earlier.end()

    def __reduce__(self) -> Any:
        raise TypeError("a save session cannot be pickled")

    def _is_over(self) -> bool:
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Commit what `request` names (engine/commit/commit.h). On failure the session ends."""
        try:
            answer: dict[str, Any] = _core.call(
                {"op": f"commit_{self._kind}", "session": self.id, **request}
            )
        except BaseException:
            self.end()
            raise
        self._finalizer.detach()
        self._forget()
        warn_of(answer)
        return answer

    def end(self) -> None:
        """Give up: remove the staging directory and release its lock. Twice is fine."""
        self._finalizer()
        self._forget()

    def _forget(self) -> None:
        key = (self._kind, self.path)
        known = _Session._open.get(key)
        if known is not None and known() is self:
            _Session._open.pop(key, None)


def replaces(overwrite: bool | Literal["all"]) -> dict[str, bool]:
    """`overwrite` in the words of the core's requests."""
    return {"overwrite": bool(overwrite), "others": overwrite == "all"}


class SaveSession(_Session):
    """The coordinator's hold on the staging directory of a save."""

    _kind = "save"

    def __init__(
        self, path: str, *, overwrite: bool | Literal["all"], shard_ranks: int = 0
    ) -> None:
        """Begin a save into directory `path`. Raises ConflictError when another one is going on,
        when there is what `overwrite` (of HuggingFaceStorageWriter) does not replace, and with
        `shard_ranks`, how many are to write shards, when a file of others in the directory would be
        read instead of them."""
        super().__init__(path, {**replaces(overwrite), "shard_ranks": shard_ranks})

    def stage_extras(self, paths: list[str]) -> list[dict[str, Any]]:
        """Copy files into staging; returns what the commit needs to know of them."""
        answer = _core.call({"op": "stage_extras", "session": self.id, "extras": paths})
        return answer["files"]  # type: ignore[no-any-return]

    def stage_final(self, request: dict[str, Any]) -> None:
        """Lay out final files and write their headers into staging (engine/save/final_files.h)."""
        _core.call({"op": "stage_final", "session": self.id, **request})


class PartSession(_Session):
    """One rank's hold on its staging directory, in a save without collectives."""

    _kind = "part"

    def __init__(self, path: str, part: dict[str, Any]) -> None:
        """Begin the part `part` (rank, world_size, run_id, sequence) in directory `path`.

        Raises ConflictError when the directory holds anything but parts of the same save.
        """
        super().__init__(path, part)


def _finalizer(owner: object, free: Callable[..., None], *what: Any) -> Any:
    """Calls free(*what) when `owner` is garbage, but for copies of it in forked children: what they
    refer to is the parent's."""
    pid = os.getpid()

    def in_this_process() -> None:
        if os.getpid() == pid:
            free(*what)

    finalizer = weakref.finalize(owner, in_this_process)
    finalizer.atexit = False
    return finalizer


def _close_checkpoint(checkpoint: int) -> None:
    """For finalizers: nothing is left to tell an error to."""
    with contextlib.suppress(CheckpointError):
        _core.call({"op": "close", "checkpoint": checkpoint})


def _free_job(job: int) -> None:
    _core.call({"op": "job_free", "job": job})


def end_session(kind: str, session: int) -> None:
    """Give up session `session` of the core, which may be unknown: a commit has consumed it then,
    and only its answer did not arrive."""
    with contextlib.suppress(InvalidArgumentError):
        _core.call({"op": f"end_{kind}", "session": session})


def _new_mutex() -> None:
    _Session._mutex = threading.Lock()  # the parent's may be held for ever


os.register_at_fork(after_in_child=_new_mutex)
