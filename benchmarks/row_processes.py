"""The processes of one row: this tree's, and that of an earlier commit if there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment
from benchmarks.run_row import DONE, Record


class _Process:
    """A process of ``benchmarks.run_row`` in ``tree``, with files of its own in ``directory``."""

    def __init__(self, words: Sequence[str], tree: Path, directory: Path, in_turn: bool) -> None:
        self._row, self._memory = words[0], words[2]
        self._work, self._lines = directory / "work", directory / "records"
        self._work.mkdir(parents=True)
        command = [sys.executable, "-m", "benchmarks.run_row", *words]
        command += ["--directory", str(self._work), "--records", str(self._lines)]
        pipe = subprocess.PIPE if in_turn else None
        self._process = subprocess.Popen(command, cwd=tree, stdin=pipe, stdout=pipe, text=True)

    def round(self) -> None:
        """Lets it run a round, and waits for the end of it, or of the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write("\n")
            process.stdin.flush()
        except BrokenPipeError:  # its records tell
            return
        while process.stdout.readline() not in ("", DONE):  # rivals print too
            pass

    def end(self) -> list[Record]:
        """What it recorded; its end is one more record if it failed."""
        status = self._process.wait()
        found: list[Record] = []
        if self._lines.exists():
            found += [json.loads(line) for line in self._lines.read_text().splitlines()]
            self._lines.unlink()
        if status != 0:
            found.append(
                {
                    "kind": "failed",
                    "row": self._row,
                    "memory": self._memory,
                    "contender": "the row",
                    "reason": f"its process ended with status {status}",
                }
            )
        shutil.rmtree(self._work)
        return found


def run_processes(words: Sequence[str], directory: Path, before: Path | None) -> list[Record]:
    """The records of a row; ``words`` are the row, ``--memory`` and the other arguments.

    With ``before`` (see :func:`benchmarks.before.build`) two processes take turns, round by round,
    and another one begins each time; it is the rival, in place of all others. Both keep their
    inputs on the disk.
    """
    if before is None:
        return _Process(words, environment.REPOSITORY, directory, in_turn=False).end()
    rounds = int(words[words.index("--rounds") + 1])
    words = [*words, "--in-turn"]
    both = [
        _Process(words, environment.REPOSITORY, directory / "now", in_turn=True),
        _Process([*words, "--before", before.name], before, directory / "before", in_turn=True),
    ]
    for number in range(rounds):
        for process in both if number % 2 == 0 else reversed(both):
            process.round()
    now, then = (process.end() for process in both)
    return now + [record for record in then if record["kind"] != "row"]
