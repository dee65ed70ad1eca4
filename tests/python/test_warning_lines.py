"""Warnings of ours name the line that led to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt import CheckpointDirectory, CheckpointReader


def cast(path: Path) -> None:
    torch_ckpt.load({"a": torch.zeros(2, dtype=torch.bfloat16)}, path)


def cast_by_stock(path: Path) -> None:
    state = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=CheckpointReader(path), no_dist=True)


def tied(path: Path) -> None:
    one = torch.zeros(2)
    torch_ckpt.load({"a": one, "b": one}, path)


def damaged(path: Path) -> None:
    (path / "torch_ckpt.json").write_text("{")
    torch_ckpt.save({"a": torch.ones(2)}, path)


def a_step_below(path: Path) -> None:
    with CheckpointDirectory(path / "run") as directory:
        directory.save({}, 2)
        directory.save({}, 1)


@pytest.mark.parametrize("does", [cast, cast_by_stock, tied, damaged, a_step_below])
def test_the_line_of_the_caller_is_named(tmp_path: Path, does: Callable[[Path], Any]) -> None:
    torch_ckpt.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "c")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        does(tmp_path / "c")
    (said,) = (each for each in caught if "torch.distributed is disabled" not in str(each.message))
    first = does.__code__.co_firstlineno
    assert said.filename == __file__ and first < said.lineno < first + 5


def test_equal_texts_of_two_lines_are_two_warnings(tmp_path: Path) -> None:
    torch_ckpt.save({"a": torch.ones(2)}, tmp_path / "c")
    half = torch.zeros(2, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            torch_ckpt.load({"a": half}, tmp_path / "c")
        torch_ckpt.load({"a": half}, tmp_path / "c")
    assert len([each for each in caught if "precision" in str(each.message)]) == 2
