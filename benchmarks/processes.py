"""CPU time of this process and of everything that it started."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path


def cpu_seconds(without: int = 0) -> float:
    """User and system time of this process and of its descendants, running and ended ones.

    ``without`` is the id of a child to leave out.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(_cpu_seconds_of(pid) for pid in _descendants(os.getpid()) if pid != without)
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    # A child belongs to the thread that started it.
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            words = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        for word in words:
            found += [int(word), *_descendants(int(word))]
    return found


def _cpu_seconds_of(pid: int) -> float:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0  # ended meanwhile
    try:
        return time.clock_gettime(clock.value)
    except OSError:  # ended meanwhile
        return 0.0
