"""The door to limits.cc: builds it, runs its commands and talks to its memory watcher."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

SOURCE = Path(__file__).with_name("limits.cc")


class LimitsError(RuntimeError):
    """limits.cc could not be built, or one of its commands failed."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one run in another process took: seconds of wall clock, CPU seconds, bytes moved."""

    seconds: float
    cpu_seconds: float
    bytes: int
    extra_memory: int = 0
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """What else was measured, for rows that report it."""


@dataclasses.dataclass(frozen=True)
class LimitsProgram:
    """The built program."""

    path: Path

    @classmethod
    def build(cls, directory: Path) -> LimitsProgram:
        """Compiles limits.cc into ``directory`` with $CXX, or g++.

        Raises:
            LimitsError: there is no compiler, or it fails.
        """
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise LimitsError(
                f"the benchmarks need the C++ compiler {compiler}: "
                "install it (Debian: apt install g++), or name another one in CXX"
            )
        path = directory / "limits"
        built = subprocess.run(
            [compiler, "-std=c++20", "-O2", "-pthread", str(SOURCE), "-o", str(path)],
            capture_output=True,
            text=True,
        )
        if built.returncode != 0:
            raise LimitsError(f"{compiler} cannot build {SOURCE.name}:\n{built.stderr}")
        return cls(path)

    def time(self, *words: str | int | Path) -> Timing:
        """Runs a command of limits.cc that measures something.

        Raises:
            LimitsError: the command failed, for example where direct I/O is refused.
        """
        answer = json.loads(self._run(words))
        return Timing(answer["seconds"], answer["cpu_seconds"], answer["bytes"])

    def touch(self, bytes_: int) -> None:
        """Touches and frees ``bytes_`` of memory in another process."""
        self._run(("touch", bytes_))

    def _run(self, words: tuple[str | int | Path, ...]) -> str:
        done = subprocess.run([str(self.path), *map(str, words)], capture_output=True, text=True)
        if done.returncode != 0:
            raise LimitsError(done.stderr.strip() or f"limits ended with {done.returncode}")
        return done.stdout


class MemoryWatcher:
    """Finds the peak of the anonymous and shared memory of this process, or of `pid`, sampled from
    outside.

    With ``tree`` that of its descendants is added, and shared memory is that of the machine,
    which counts what several processes share once. A context manager. Not for use by several
    threads.
    """

    def __init__(self, program: LimitsProgram, tree: bool = False, pid: int | None = None) -> None:
        words = ["watch_tree" if tree else "watch", str(os.getpid() if pid is None else pid)]
        self._process = subprocess.Popen(
            [str(program.path), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> MemoryWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()

    @property
    def pid(self) -> int:
        """The process that watches."""
        return self._process.pid

    def begin(self) -> int:
        """Starts a watch; returns the bytes in use now."""
        return self._ask(b"b\n")

    def end(self) -> int:
        """Ends the watch; returns the largest use in bytes since it began."""
        return self._ask(b"e\n")

    def _ask(self, command: bytes) -> int:
        self._pipe(self._process.stdin).write(command)
        answer = self._pipe(self._process.stdout).readline()
        if not answer:
            raise LimitsError("the memory watcher has ended")
        return int(answer)

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # both are pipes by construction
        return pipe
