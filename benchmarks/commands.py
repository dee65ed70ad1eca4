"""One command, from its start to its end, as a contender's run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks import environment
from benchmarks.program import Timing

OURS = ("-m", "torch_ckpt")


def run_command(words: Sequence[str], bytes_: int, *, status: int = 0) -> Timing:
    """Runs ``python words``; its seconds, its CPU, and the most memory it had at once.

    Raises:
        RuntimeError: it ended with another exit status than ``status``.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=environment.REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(environment.REPOSITORY)},
    )
    peak = _Peak(process.pid)
    peak.start()
    assert process.stderr is not None
    errors = process.stderr.read()
    _, ended, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.stderr.close()
    peak.join()
    process.returncode = os.waitstatus_to_exitcode(ended)
    if process.returncode != status:
        last = errors.decode().strip().splitlines()[-1:]
        raise RuntimeError(": ".join([f"it ended with status {process.returncode}", *last]))
    cpu = usage.ru_utime + usage.ru_stime
    figures = {"seconds": seconds, "peak_mb": peak.bytes / 1e6}
    return Timing(seconds, cpu, bytes_, peak.bytes, figures)


class _Peak(threading.Thread):
    """Looks at the most memory that a process has had, until it ends.

    The kernel's own figure, ru_maxrss, counts what the parent had when it was started.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._path = f"/proc/{pid}/status"
        self.bytes = 0

    def run(self) -> None:
        while True:
            try:
                with open(self._path) as file:
                    found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
            except OSError:
                return
            if not found:  # a process that has ended has no memory
                return
            self.bytes = int(found[0]) * 1024
            time.sleep(0.005)


def script(function: str, *arguments: object) -> list[str]:
    """The words that call a function, "module:name", with arguments as JSON has them."""
    module, _, name = function.partition(":")
    text = json.dumps([str(each) for each in arguments])
    return ["-c", f"import json; from {module} import {name}; {name}(*json.loads({text!r}))"]
