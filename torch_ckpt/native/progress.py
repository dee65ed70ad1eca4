"""Telling somebody how far native jobs are, and ending them when that somebody wants it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch_ckpt.native.jobs import Job, Jobs, at_exit, in_thread

# (bytes done, bytes in all); the second is 0 while the job is still planning.
Progress = Callable[[int, int], None]

_INTERVAL = 0.1  # seconds between two reports


@contextlib.contextmanager
def told(
    jobs: Job | Jobs, progress: Progress | None, cancel: threading.Event | None = None
) -> Iterator[None]:
    """While the block runs `jobs`, call `progress`, on another thread, every 0.1 s, and once at the
    end; at the end of the interpreter only once. What it raises cancels them and comes out of here;
    `cancel`, once it is set, cancels them alone, so that what is done all the same, as a commit,
    stays done."""
    if (progress is None and cancel is None) or at_exit():
        yield
        if progress is not None:
            progress(*jobs.progress())
        return
    over = threading.Event()

    def tell() -> None:
        try:
            while cancel is None or not cancel.is_set():
                if over.wait(_INTERVAL):
                    return
                if progress is not None:
                    progress(*jobs.progress())
            jobs.cancel()
        except BaseException:
            jobs.cancel()
            raise

    teller = in_thread(tell, "torch_ckpt-progress")
    try:
        yield
    finally:
        over.set()
        try:
            teller.result()
        finally:
            del teller  # or what it raises would find itself in this frame
    if progress is not None:
        progress(*jobs.progress())
