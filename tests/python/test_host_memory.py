"""Host memory of a save, a load and a consolidation does not grow with the state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import HERE, PACKAGE

MIB = 1 << 20
BUDGET = 256 * MIB  # of all buffers of the engine in a process (csrc/runtime/arena.h)


def measure(what: str, folder: Path) -> dict[str, int]:
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "host_memory.py"), what, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone afterwards: pytest would keep gigabytes of three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_a_state_of_1_gib_needs_little_beside_itself(folder: Path) -> None:
    saved = measure("save", folder)
    assert saved["size"] == 1 << 30
    assert saved["grown"] < BUDGET + 64 * MIB
    loaded = measure("load", folder)
    assert loaded["wrong"] == 0
    assert loaded["grown"] < BUDGET + 64 * MIB
    merged = measure("merge", folder)
    for kind in ("saved", "columns"):
        (out,) = (folder / f"{kind}-out").glob("*.safetensors")
        assert out.stat().st_size > 1 << 30
    assert merged["of 32 MiB"] < (32 + 16) * MIB
    assert merged["of 32 MiB"] + merged["of 128 MiB"] < (128 + 16) * MIB
    assert merged["of 128 MiB"] > 32 * MIB, "the threads never need so much"
    assert merged["grown"] < BUDGET + 128 * MIB
    assert merged["held"] > BUDGET + 128 * MIB, "nothing is measured"


def test_async_saves_need_one_copy_of_the_state(folder: Path) -> None:
    grown = measure("async", folder)["grown"]
    assert grown < 256 * MIB + 64 * MIB
    assert grown > 240 * MIB, "nothing is measured"
