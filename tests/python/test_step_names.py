"""Which names are those of a run's checkpoints: zeros before the step, as other tools write them,
and what is no step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import Checkpoint, CheckpointDirectory


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


def test_steps_with_zeros_before_them(tmp_path: Path) -> None:
    for step in (90, 100):
        torch_ckpt.save(state(step), checkpoint_id=tmp_path / f"step-{step:06}")
    with CheckpointDirectory(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.steps() == [90, 100]
        assert checkpoints.latest() == str(tmp_path / "step-000100")
        target = state(0)
        assert checkpoints.load(target) == 100 and target["w"][0] == 100
        assert checkpoints.load(target, step=90) == 90 and target["w"][0] == 90
        checkpoints.save(state(101), 100)  # over the one that is there
        checkpoints.save(state(110), 110)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-000100", "step-110"]
    assert (tmp_path / "LATEST").read_text() == "step-110\n"
    with CheckpointDirectory(tmp_path) as checkpoints:
        assert checkpoints.load(target, step=100) == 100 and target["w"][0] == 101


def test_one_step_under_two_names(tmp_path: Path) -> None:
    for name, value in (("step-007", 1), ("step-7", 2)):
        torch_ckpt.save(state(value), checkpoint_id=tmp_path / name)
    with CheckpointDirectory(tmp_path) as checkpoints:
        target = state(0)
        assert checkpoints.steps() == [7]
        assert checkpoints.load(target) == 7 and target["w"][0] == 2


@pytest.mark.parametrize(
    "name", ["step-+7", "step-7 ", "step-", "step-7x", "step-٧", "Step-7", "step--7"]
)
def test_other_names_are_not_looked_at(tmp_path: Path, name: str) -> None:
    torch_ckpt.save(state(7), checkpoint_id=tmp_path / name)
    with CheckpointDirectory(tmp_path, keep_last=1) as directory:
        assert directory.steps() == []
        directory.save(state(7), 7)
        assert directory.steps() == [7]
        for step in (8, 9):
            directory.save(state(step), step)
    assert directory.steps() == [9]
    assert Checkpoint(tmp_path / name).verify().files > 0
