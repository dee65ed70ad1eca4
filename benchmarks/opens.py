"""How often processes open files, counted by strace: the same for ours and for rivals."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "/benchmarks-counts-from-here", "/benchmarks-counts-to-here"
# One line per call; the rest of one that another thread interrupted is not counted again.
CALL = re.compile(r"^\d+ +(open|openat|openat2|open_by_handle_at|creat)\(")


class StraceError(RuntimeError):
    """strace could not be run, or what it ran failed."""


def why_not() -> str:
    """Why opens cannot be counted; empty if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: apt install strace)"
    return ""


def mark(where: str) -> None:
    """Called with BEGIN and END by what is counted: it fails to open a file of that name."""
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(where, os.O_RDONLY))


def count(words: list[str], directory: Path, environment: Mapping[str, str]) -> int:
    """Opens of ``directory`` and of what is below it by the command and all that it starts, failed
    ones too, between its first BEGIN and its last END.

    Raises:
        StraceError: the command failed, or it made no marks.
    """
    with tempfile.NamedTemporaryFile(prefix="opens-") as log:
        traced = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "4096", "-o", log.name]
        traced += ["-e", "trace=open,openat,openat2,open_by_handle_at,creat", "-e", "signal=none"]
        done = subprocess.run(
            [*traced, *words], env=dict(environment), capture_output=True, text=True
        )
        lines = Path(log.name).read_text(errors="replace").splitlines()
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise StraceError(": ".join([f"it ended with status {done.returncode}", *last]))
    begins = [number for number, line in enumerate(lines) if BEGIN in line]
    ends = [number for number, line in enumerate(lines) if END in line]
    if not begins or not ends:
        raise StraceError("what was counted made no marks")
    inside = lines[begins[0] + 1 : ends[-1]]
    return sum(bool(CALL.match(line)) and str(directory) in line for line in inside)
