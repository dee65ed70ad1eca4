"""What a call walks through, counted: the table in docs/design.md is what is seen here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from walks import walk

import torch_ckpt

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
STATE = {"model": {"w": torch.arange(4.0), "b": torch.ones(2)}, "step": 3}
JOBS = (
    "save, sharded",
    "async_save",
    "load into a target",
    "open, one tensor",
    "convert to hf",
    "convert to torch",
)


def table() -> dict[str, list[int]]:
    """The rows that docs/design.md prints."""
    rows = re.findall(
        r"^\| ([a-z_, ]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", DESIGN.read_text(), re.M
    )
    return {name: list(map(int, counts)) for name, *counts in rows}


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    saved = folder / "saved"
    torch_ckpt.save(STATE, saved)

    def target() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(4), "b": torch.zeros(2)}, "step": 0}

    return {
        "save, sharded": lambda: torch_ckpt.save(STATE, folder / "a"),
        "async_save": lambda: torch_ckpt.async_save(STATE, folder / "b").result(),
        "load into a target": lambda: torch_ckpt.load(target(), saved),
        "open, one tensor": lambda: torch_ckpt.open(saved)["model.w"][:],
        "convert to hf": lambda: torch_ckpt.convert(saved, folder / "hf", "hf", objects=False),
        "convert to torch": lambda: torch_ckpt.convert(saved, folder / "a.pt", "torch"),
    }


@pytest.mark.parametrize("job", JOBS)
def test_the_table_says_what_is_walked(job: str, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    calls(tmp_path / "warm")[job]()  # what is imported or made once
    counts = walk(calls(tmp_path)[job]).counts()
    printed = table()[job]
    # Versions of torch and Python differ by a little, and so does who waits for whom.
    assert abs(counts[0] - printed[0]) <= 1, counts
    assert all(abs(a - b) <= 2 + b / 10 for a, b in zip(counts, printed, strict=True)), counts
