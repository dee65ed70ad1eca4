"""A CheckpointDirectory whose saver is killed at any moment, and one that is read meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_checks import check, hidden, latest_file, loaded, visible
from launch import HERE, PACKAGE

from torch_ckpt import CheckpointDirectory, CheckpointError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


class Saver:
    """directory_saver.py, which forks a child for every run."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(PACKAGE), str(HERE)])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "directory_saver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def _line(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def start(self, root: Path, *, keep: int, first: int, count: int, call: int = 0) -> int:
        """The child's process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{root} {keep} {first} {count} {call}\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> int:
        return self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0


@pytest.fixture
def saver() -> Iterator[Saver]:
    running = Saver()
    yield running
    running.close()


def test_killed_before_any_call_of_ours(saver: Saver, tmp_path: Path) -> None:
    """Between commit, LATEST and deletion, and in the middle of each; the next saver as well."""
    newest = 0  # the first call comes before it is committed
    for call in range(1, 1000):
        root = tmp_path / str(call)
        saver.start(root, keep=1, first=1, count=3, call=call)
        status = saver.end()
        newest = check(root, newest, 1)
        saver.start(root, keep=1, first=newest + 1, count=1, call=call)
        saver.end()
        second = check(root, newest, 1)
        saver.start(root, keep=1, first=second + 1, count=1)
        assert saver.end() == 0
        assert visible(root) == [second + 1] and latest_file(root) == second + 1
        assert hidden(root) == [], f"call {call}"
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert newest == 3 and call > 30


def test_killed_at_random(saver: Saver, root: Path) -> None:
    newest, kills, longest = 0, 0, 0.1
    end = time.monotonic() + 150
    while kills < 30 or newest < 30:
        assert time.monotonic() < end, (kills, newest)
        child = saver.start(root, keep=2, first=newest + 1, count=1000)
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        assert saver.end() == -signal.SIGKILL
        kills += 1
        before = newest
        if root.exists():
            newest = check(root, newest, 2)
        if newest == before:
            longest *= 1.2  # a busy machine
    saver.start(root, keep=2, first=newest + 1, count=1)
    assert saver.end() == 0
    assert check(root, newest + 1, 2) == newest + 1
    assert visible(root) == [newest, newest + 1] and hidden(root) == []
    assert latest_file(root) == newest + 1


def test_a_reader_beside_the_saver(saver: Saver, root: Path) -> None:
    count = 60
    directory = CheckpointDirectory(root)
    saver.start(root, keep=2, first=1, count=count)
    seen: list[int] = []
    deleted, said = 0, 0
    end = time.monotonic() + 60
    while not seen or seen[-1] < count:
        assert time.monotonic() < end, seen
        latest = directory.latest()
        if latest is None:
            continue
        if (root / "LATEST").exists():
            assert latest_file(root) >= said  # whole at any time, and never backwards
            said = latest_file(root)
        step = int(latest.rpartition("-")[2])
        assert not seen or step >= seen[-1]
        try:
            assert loaded(directory, step) == step
        except CheckpointError:
            # While it was loaded two newer ones have come. Nothing else may be the reason.
            assert directory.steps()[0] > step
            deleted += 1
            continue
        seen.append(step)
    assert saver.end() == 0
    assert len(set(seen)) > 5 and deleted < len(seen), (seen, deleted)
