"""The path in second place, and a load that makes its own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt


def sample() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 3}


def test_the_path_is_the_second_argument(tmp_path: Path) -> None:
    torch_ckpt.save(sample(), tmp_path / "a")
    torch_ckpt.async_save(sample(), tmp_path / "b").result()
    for name in "ab":
        target = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
        assert torch_ckpt.load(target, tmp_path / name) is target
        assert target["step"] == 3
        assert torch.equal(target["model"]["w"], sample()["model"]["w"])


def test_without_a_state_everything_is_given_back(tmp_path: Path) -> None:
    torch_ckpt.save(sample(), tmp_path / "a")
    loaded = torch_ckpt.load(path=tmp_path / "a")
    assert loaded.keys() == {"model", "step"}
    assert loaded["step"] == 3
    assert torch.equal(loaded["model"]["w"], sample()["model"]["w"])


def test_one_path_is_enough(tmp_path: Path) -> None:
    both: dict[str, Any] = {"path": tmp_path, "checkpoint_id": tmp_path}
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="the same argument"):
        torch_ckpt.save(sample(), **both)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="the same argument"):
        torch_ckpt.load(sample(), **both)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="needs a path"):
        torch_ckpt.load()
