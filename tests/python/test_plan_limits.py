"""What the format cannot hold is refused while a save is planned: no directory is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

import torch_ckpt
from torch_ckpt.dcp.plan.global_plan import check_catalog_size
from torch_ckpt.errors import CheckpointError, UnsupportedError


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"ok": torch.ones(2), "w": torch.ones([1] * 9)}, "9 dimensions"),
        ({"ok": torch.ones(2), "a\0b": torch.ones(2)}, "cannot hold this name"),
        ({"ok": torch.ones(2), "__metadata__": torch.ones(2)}, "cannot hold this name"),
        ({"ok": torch.ones(2), "n" * 65_536: torch.ones(2)}, "65536 bytes"),
        ({"ok": torch.ones(2), "\ud800": torch.ones(2)}, "not UTF-8"),
        ({"ok": torch.ones(2), "n" * 65_536: 1}, "65536 bytes"),
    ],
    ids=["dimensions", "NUL", "reserved", "long", "surrogate", "object"],
)
def test_names_and_shapes(tmp_path: Path, state: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_the_catalog(tmp_path: Path) -> None:
    planner = torch_ckpt.SavePlanner()
    planner.set_up_planner({"w": torch.ones(64, 3), "step": 3}, is_coordinator=True)
    plan: SavePlan = planner.create_local_plan()
    item = next(item for item in plan.items if item.index.fqn == "w")
    many = dataclasses.replace(plan, items=[item] * 100)
    # 100 boxes of 11 bytes and four numbers below 128, and one name.
    most = 100 * (11 + 4) + 2 * 1 + 64
    check_catalog_size([many], limit=most)
    with pytest.raises(UnsupportedError, match=f"could take {most} bytes"):
        check_catalog_size([many], limit=most - 1)
    with pytest.raises(UnsupportedError, match="1 leaves"):
        check_catalog_size([many, many], limit=most)
