"""Starting torchrun, following what its workers report, stopping all of them at one instant, and
losing one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = Path(__file__).parent
# Nothing is downloaded; one thread per process, since there is one process per core.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_STOP_SECONDS = 30.0
_ENDS_SECONDS = 120.0


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to look at."""


class Job:
    """One torchrun job as a context manager; leaving it kills whatever still runs.

    ``events`` accumulates what rank 0 has reported, in order. Not for use by several threads.
    """

    def __init__(self, name: str, script: str, world: int, work: Path, args: list[str]) -> None:
        self.name = name
        self.world = world
        self.events: list[dict[str, Any]] = []
        self.log = work / f"{name}.log"
        self._event_file = work / f"{name}.events.jsonl"
        self._offset = 0
        self._command = [sys.executable, "-m", "torch.distributed.run"]
        self._command += ["--standalone", f"--nproc-per-node={world}", str(_HERE / script)]
        self._command += [f"--work={work}", f"--events={self._event_file}", *args]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        environment = os.environ | _ENVIRONMENT
        # Containers often cannot resolve their own host name; all workers are on this machine.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._event_file.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running().poll() is None:
            self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DemoError(f"the job {self.name!r} was not started")
        return self._process

    def poll(self) -> list[dict[str, Any]]:
        """Returns the events that are new since the last call."""
        try:
            with self._event_file.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        end = text.rfind(b"\n") + 1  # the last line may be half written
        self._offset += end
        new = [json.loads(line) for line in text[:end].splitlines()]
        self.events += new
        return new

    def ended(self) -> bool:
        """Whether torchrun has ended; raises DemoError with the log's end if it failed."""
        code = self._running().poll()
        if code is None:
            return False
        if code != 0:
            raise DemoError(
                f"the job {self.name!r} failed with exit status {code}; from {self.log}:\n"
                + "\n".join(_why(self.log.read_text(encoding="utf-8", errors="replace")))
            )
        return True

    def find(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def processes(self) -> list[int]:
        """Returns the process ids: the workers' as they reported them, then torchrun's."""
        self.poll()
        ready = self.find("ready")
        workers = ready[0]["pids"] if ready else _children(self._running().pid)
        return [*workers, self._running().pid]

    def freeze(self) -> None:
        """Stops every process with SIGSTOP and waits until none of their threads runs."""
        pids = self.processes()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_SECONDS
        while not all(_is_stopped(pid) for pid in pids):
            if time.monotonic() > deadline:
                raise DemoError(f"the job {self.name!r} did not stop in {_STOP_SECONDS:.0f} s")
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets processes that freeze() stopped go on."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def lose(self, rank: int) -> float:
        """Kills one worker of a job that freeze() has stopped, lets the others go on, and waits
        until they have ended too; returns the seconds until then."""
        workers = self.find("ready")[0]["pids"]
        os.kill(workers[rank], signal.SIGKILL)
        begin = time.monotonic()
        self.thaw()
        try:
            code = self._running().wait(timeout=_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the ranks that are left go on after {_ENDS_SECONDS:.0f} s") from None
        if code == 0:
            raise DemoError(f"the job {self.name!r} did not notice that a rank is gone")
        self.poll()
        return time.monotonic() - begin

    def kill(self) -> None:
        """Sends SIGKILL to every process and waits for their end."""
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running().wait()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(_states(pid) - {"Z", "X"} for pid in pids):
            if time.monotonic() > deadline:
                raise DemoError(f"processes {pids} are still there after SIGKILL")
            time.sleep(0.001)


def _why(log: str) -> list[str]:
    """Returns the lines that say what went wrong: one rank's traceback, else the log's end.

    torchrun ends a log with a long summary of its own, without the cause.
    """
    lines = log.splitlines()
    ranks = [line for line in lines if line.startswith("[rank")]
    if not ranks:
        return lines[-40:]
    first = ranks[0].split(":")[0]
    return [line for line in ranks if line.startswith(f"{first}:")][-25:]


def _states(pid: int) -> set[str]:
    """Returns the states of a process's threads as /proc names them; empty if it is gone."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


def _is_stopped(pid: int) -> bool:
    return _states(pid) <= {"T", "Z", "X"}


def _children(pid: int) -> list[int]:
    """Returns the child processes of ``pid``."""
    children: list[int] = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(child) for child in entry.read_text().split()]
    return children
