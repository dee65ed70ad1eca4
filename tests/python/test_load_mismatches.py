"""Whatever of the target does not fit the checkpoint, in one error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_states import FAILED

import torch_ckpt
from torch_ckpt import PerRank

STATE = {
    "wide": torch.ones(2, 3),
    "deep": {"long": torch.ones(5), "same": torch.ones(1), "tensor": torch.ones(4)},
    "step": 7,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def test_all_mismatches_are_in_one_error(checkpoint: Path) -> None:
    target = {
        "wide": torch.zeros(3, 2),
        "deep": {"long": torch.zeros(6), "same": torch.zeros(1), "tensor": 3},
        "step": 0,
    }
    with pytest.raises(FAILED) as caught:
        torch_ckpt.load(target, checkpoint_id=checkpoint)
    said = str(caught.value)
    assert "3 leaves of the target do not fit the checkpoint: " in said
    for each in (
        "Size mismatch between saved torch.Size([2, 3]) and current: torch.Size([3, 2]) for wide: "
        "the target expects shape [3, 2], the checkpoint has [2, 3]",
        "Size mismatch between saved torch.Size([5]) and current: torch.Size([6]) for deep.long: "
        "the target expects shape [6], the checkpoint has [5]",
        "deep.tensor: the target expects an object (it has a int), the checkpoint has a tensor of "
        "shape [4] and torch.float32",
    ):
        assert each in said
    assert "same" not in said and "step" not in said
    assert not target["deep"]["same"].any()  # nothing was loaded


def test_one_mismatch_is_said_as_stock_says_it(checkpoint: Path) -> None:
    for load, planner in ((dcp.load, torch_ckpt.LoadPlanner()), (torch_ckpt.load, None)):
        with pytest.raises(FAILED) as caught:
            load(
                {"wide": torch.zeros(3)},
                storage_reader=torch_ckpt.HuggingFaceStorageReader(checkpoint),
                planner=planner,
            )
        said = str(caught.value)
        assert "Size mismatch between saved torch.Size([2, 3]) and current: torch.Size([3])" in said
        assert "do not fit" not in said


def test_of_very_many_twenty_are_named(tmp_path: Path) -> None:
    torch_ckpt.save({f"t{n:02}": torch.ones(2) for n in range(33)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(FAILED, match="33 leaves of the target .*for t19: .*; and 13 more") as e:
        torch_ckpt.load(
            {f"t{n:02}": torch.ones(3) for n in range(33)}, checkpoint_id=tmp_path / "c"
        )
    assert "for t20:" not in str(e.value)


def test_per_rank_values_of_other_worlds_are_in_one_error(tmp_path: Path) -> None:
    state = {"a": PerRank(1), "b": PerRank(2)}
    of_two = torch_ckpt.SavePlanner(rank=0, world_size=2)
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", planner=of_two)
    of_three = torch_ckpt.LoadPlanner(rank=1, world_size=3)
    with pytest.raises(FAILED, match="a: this per-rank value was .*; b: this per-rank value"):
        torch_ckpt.load(state, checkpoint_id=tmp_path / "c", planner=of_three)
