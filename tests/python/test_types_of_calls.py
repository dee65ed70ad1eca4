"""What type checkers of users are told of saves and loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
from collections import OrderedDict
from typing import Any

import torch
import torch_ckpt


def dicts(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    torch_ckpt.save(state, "c")
    torch_ckpt.async_save(tensors, "c").result()
    same: dict[str, torch.Tensor] = torch_ckpt.load(tensors, "c")
    ordered: OrderedDict[str, Any] = torch_ckpt.load(OrderedDict(same), "c")
    torch_ckpt.load(ordered, "c")
    return torch_ckpt.load(state, "c")


def modules(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    torch_ckpt.save(model, "c")
    torch_ckpt.async_save({"model": model, "optimizer": optimizer}, "c")
    loaded: torch.nn.Module = torch_ckpt.load(model, "c")
    torch_ckpt.load(optimizer, "c")
    with torch_ckpt.CheckpointDirectory("run") as run:
        run.save(loaded, 1)
        run.async_save(model.state_dict(), 2)
        run.load({"model": model})
    maybe: dict[str, Any] | None = None if model.training else {}
    some: dict[str, Any] = torch_ckpt.load(maybe, "c")
    return some or torch_ckpt.load(path="c")


def wrong() -> None:
    torch_ckpt.save([torch.ones(2)], "c")
    torch_ckpt.load(torch.ones(2), "c")
"""


@pytest.mark.slow
def test_mypy_strict_takes_states_of_all_kinds(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    use = tmp_path / "use.py"
    use.write_text(USE)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    said, errors, _ = api.run(["--strict", *config, str(use)])
    found = re.findall(r"use\.py:(\d+): error: (.*?)[:;\[]", said)
    last = len(USE.splitlines())
    assert [int(line) for line, _ in found] == [last - 1, last], said + errors
    assert "save" in found[0][1] and "load" in found[1][1], said
