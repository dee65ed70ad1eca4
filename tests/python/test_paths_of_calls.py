"""The paths that docs/design.md prints are the ones that calls take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from walks import walk

import torch_ckpt

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
PLACES = ("torch_ckpt", "csrc")
STATE = {"model": {"w": torch.arange(4.0)}, "step": 3}


def printed(path: str) -> set[str]:
    """The modules of Python in the block of docs/design.md that begins with `path`."""
    text = DESIGN.read_text(encoding="utf-8")
    block = re.search(rf"^{path} .*?(?=^[A-Z]+ |^```)", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return set(re.findall(r"[\w/]+\.py", block[0]))


def test_the_files_that_are_printed_are_there() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(SAVE .*?)^```", text, re.DOTALL | re.MULTILINE)
    files = set(re.findall(r"[\w/]+\.(?:py|cc|h)\b", block))
    assert len(files) > 40
    root = DESIGN.parents[1]
    gone = {name for name in files if not any((root / at / name).is_file() for at in PLACES)}
    assert not gone, gone


# Beside what is printed: options, jobs, errors and the like. The numbers may fall, not grow.
@pytest.mark.parametrize(("path", "most"), [("SAVE", 32), ("LOAD", 28), ("STAGE", 38)])
def test_calls_take_the_path_that_is_printed(tmp_path: Path, path: str, most: int) -> None:
    torch_ckpt.save(STATE, tmp_path / "c")
    torch_ckpt.async_save(STATE, tmp_path / "c").result()
    torch_ckpt.load(path=tmp_path / "c")  # all is imported now
    calls = {
        "SAVE": lambda: torch_ckpt.save(STATE, tmp_path / "c"),
        "LOAD": lambda: torch_ckpt.load(dict(STATE), tmp_path / "c"),
        "STAGE": lambda: torch_ckpt.async_save(STATE, tmp_path / "c").result(),
    }
    files = walk(calls[path]).files()
    assert len(printed(path)) <= 12
    # In another process, or of targets that share memory.
    elsewhere = {"calls/process.py", "staging/crossing.py", "dcp/read/targets.py"}
    assert printed(path) - elsewhere <= files
    assert len(files) <= most, sorted(files)
