"""One measurement: seconds, CPU seconds of this process and of the machine, peak memory."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import resource
import time

from benchmarks.contender import Contender
from benchmarks.program import MemoryWatcher


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one run of one contender took."""

    seconds: float
    bytes: int
    cpu_seconds: float
    """User and system time of this process and of its children."""
    machine_cpu_seconds: float
    """Busy time of all CPUs, kernel threads and other processes included; ticks of 10 ms."""
    extra_memory: int
    """Peak of anonymous and shared memory above the start, in bytes; without the page cache.
    0 for limits, which run in another process."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """What else a run in another process has measured."""


def memory_in_use(watcher: MemoryWatcher) -> int:
    """Anonymous and shared memory of this process now, in bytes, after freeing what is free."""
    _give_back_memory()
    watcher.begin()
    return watcher.end()


def measure(contender: Contender, bytes_: int, watcher: MemoryWatcher, kept: int) -> Measurement:
    """Runs ``contender.run`` once under the clocks.

    ``kept``: bytes that earlier runs of contenders of this role have left in use, which are none of
    this run's start. Our arena keeps its pages for the next run, which would otherwise look free.
    """
    start_memory = memory_in_use(watcher) - kept
    watcher.begin()
    start_machine = _machine_cpu_seconds()
    start_cpu = _cpu_seconds()
    start = time.perf_counter()
    timing = contender.run()
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - start_cpu
    machine = _machine_cpu_seconds() - start_machine
    peak = watcher.end()
    if timing is not None:
        cpu = timing.cpu_seconds
        extra, figures = timing.extra_memory, timing.figures
        return Measurement(timing.seconds, timing.bytes, cpu, cpu, extra, figures)
    return Measurement(seconds, bytes_, cpu, machine, max(0, peak - start_memory))


def _give_back_memory() -> None:
    """Frees what the contender before left, so that nobody profits from its heap."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)


def _cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _machine_cpu_seconds() -> float:
    with open("/proc/stat") as file:
        fields = file.readline().split()
    # cpu user nice system idle iowait irq softirq steal ...; guest time is inside user
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
