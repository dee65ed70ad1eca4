"""Running a native job while somebody is told how far it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from torch_ckpt.errors import CancelledError
from torch_ckpt.jobs import Job, Jobs, in_thread

# (bytes done, bytes in all); the second is 0 while the job is still planning.
Progress = Callable[[int, int], None]

_INTERVAL = 0.1  # seconds between two reports


def run_job(job: Job, work: Callable[[], Any], progress: Progress | None = None) -> Any:
    """Call `work`, a blocking native call under `job`, and return what it returns.

    `progress` is called on this thread every 0.1 s and once at the end. What it raises, and
    Ctrl-C, cancel the job and come out of here once the job has stopped.
    """
    if progress is None:
        return job.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="torch_ckpt-job") as pool:
        future = pool.submit(work)
        try:
            while not wait([future], _INTERVAL).done:
                progress(*job.progress())
            result = future.result()
            progress(*job.progress())
        except BaseException:
            job.cancel()
            raise
    return result


@contextlib.contextmanager
def told(
    jobs: Jobs, progress: Progress | None, cancel: threading.Event | None = None
) -> Iterator[None]:
    """While the block runs, call `progress`, on another thread, every 0.1 s and once at the end.
    What it raises, and `cancel` once it is set, cancel `jobs` and come out of here."""
    if progress is None and cancel is None:
        yield
        return
    over = threading.Event()

    def tell() -> None:
        try:
            while not over.wait(_INTERVAL):
                if cancel is not None and cancel.is_set():
                    raise CancelledError("was cancelled")
                if progress is not None:
                    progress(*jobs.progress())
        except BaseException:
            jobs.cancel()
            raise

    teller = in_thread(tell, "torch_ckpt-progress")
    try:
        yield
    finally:
        over.set()
        error = teller.exception()
        if error is not None:
            raise error
    if progress is not None:
        progress(*jobs.progress())
