"""The paths that docs/design.md prints are the ones that calls take."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from walks import walk

import torch_ckpt
from torch_ckpt.cli import cli

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
    # Elsewhere the page may leave out the folders that a name is clear without.
    there = [
        f"/{path.relative_to(root)}"
        for place in (*PLACES, "tests", "docs")
        for path in (root / place).rglob("*.*")
    ]
    named = set(re.findall(r"`([\w/]+\.(?:py|cc|h))`", text))
    assert len(named) > 80
    gone = {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
    assert not gone, gone


def doctor(path: Path) -> None:
    with contextlib.suppress(SystemExit):  # what it finds of this machine does not matter here
        cli(["doctor", str(path), "-q"], standalone_mode=False)


def step(root: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with torch_ckpt.Checkpointer(root, model, optimizer, keep_last=2) as checkpointer:
        checkpointer.save(1)


def test_a_step_is_few_files_more_than_a_save(tmp_path: Path) -> None:
    def both(to: Path) -> None:
        torch_ckpt.save(STATE, to / "final", layout="final")
        torch_ckpt.async_save(STATE, to / "beside").result()

    for call in (both, step):
        call(tmp_path / f"warm-{call.__name__}")
    of_saves = walk(lambda: both(tmp_path / "saves")).files()
    of_a_step = walk(lambda: step(tmp_path / "step")).files()
    assert len(of_a_step - of_saves) <= 14, sorted(of_a_step - of_saves)


# Beside what is printed: options, jobs, errors and the like. The numbers may fall, not grow.
@pytest.mark.parametrize(
    ("path", "most"),
    [
        *(("SAVE", 34), ("FINAL", 36), ("LOAD", 28), ("STAGE", 41), ("STEP", 57)),
        *(("MERGE", 15), ("DOCTOR", 8)),
    ],
)
def test_calls_take_the_path_that_is_printed(tmp_path: Path, path: str, most: int) -> None:
    tensors = {"w": torch.arange(4.0)}
    merges = (
        torch_ckpt.consolidate_safetensors_files,
        torch_ckpt.consolidate_safetensors_files_on_every_rank,
    )
    calls: dict[str, Callable[[Path], Any]] = {
        "SAVE": lambda to: torch_ckpt.save(STATE, to),
        "FINAL": lambda to: torch_ckpt.save(STATE, to, layout="final"),
        "LOAD": lambda _: torch_ckpt.load(dict(STATE), tmp_path / "c"),
        "STAGE": lambda to: torch_ckpt.async_save(STATE, to).result(),
        "STEP": step,
        "MERGE": lambda to: [merge(tmp_path / "shards", to / merge.__name__) for merge in merges],
        "DOCTOR": lambda _: doctor(tmp_path),
    }
    torch_ckpt.save(STATE, tmp_path / "c")
    torch_ckpt.save(tensors, tmp_path / "shards")
    calls[path](tmp_path / "warm")  # all is imported now
    files = walk(lambda: calls[path](tmp_path / "out")).files()
    assert 2 <= len(printed(path)) <= 12
    # In another process, or of targets that share memory.
    elsewhere = {"calls/process.py", "staging/crossing.py", "dcp/read/targets.py"}
    assert printed(path) - elsewhere <= files
    assert len(files) <= most, sorted(files)


def test_every_path_is_walked() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(SAVE .*?)^```", text, re.DOTALL | re.MULTILINE)
    named = re.findall(r"^([A-Z]+) ", block, re.MULTILINE)
    marks = test_calls_take_the_path_that_is_printed.pytestmark  # type: ignore[attr-defined]
    walked = {path for path, _ in marks[0].args[1]}
    # An operator has no Python behind it.
    assert walked == {*named} - {"OPS"} and printed("OPS") == set()
