"""The seeds of the fuzz targets are there, small, and what the code writes today."""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT / "tests/fuzz/seeds"
AGAIN = (
    "a format has changed: run .venv/bin/python tests/fuzz/make_seeds.py, and commit what it makes"
)


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_every_target_has_seeds() -> None:
    text = (ROOT / "cmake/Fuzz.cmake").read_text(encoding="utf-8")
    targets = set(re.findall(r"tests/fuzz/(\w+)\.cc", text))
    assert targets - {"short_header_fuzz", "scaled_fuzz", "view_fuzz"} == {
        path.name for path in SEEDS.iterdir() if path.is_dir()
    }
    assert sum(path.stat().st_size for path in SEEDS.rglob("*") if path.is_file()) < 200_000


@pytest.mark.usefixtures("fault_points")
def test_the_seeds_are_what_is_written_today(tmp_path: Path) -> None:
    # A process of its own: which strings a pickle holds once is a matter of what ran before.
    command = [sys.executable, ROOT / "tests/fuzz/make_seeds.py", tmp_path / "seeds"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=600)
    assert files_below(tmp_path / "seeds") == files_below(SEEDS), AGAIN
    names = sorted(files_below(SEEDS))
    _, differing, failed = filecmp.cmpfiles(tmp_path / "seeds", SEEDS, names, shallow=False)
    assert (differing, failed) == ([], []), AGAIN
