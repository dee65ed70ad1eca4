"""A GPT of Megatron Core's, trained by Megatron's own code on this engine: killed, and resumed with
other numbers of ranks, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_scripts

from torch_ckpt.megatron import dist_checkpointing

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.campaign

STEPS = 6


def run(
    folder: Path, name: str, world: int, tp: int, kind: str, *more: str, dies: bool = False
) -> dict[str, Any]:
    """What a training says at its end; {} for one that dies."""
    report = folder / f"{name}.json"
    words = [str(folder / "checkpoints"), "--tp", str(tp), "--kind", kind, "--report", str(report)]
    (folder / "checkpoints").mkdir(exist_ok=True)
    ended = run_scripts("megatron_gpt.py", world, [*words, *more])
    assert all((status == 0) == (not dies) for status, _ in ended), ended
    return {} if dies else json.loads(report.read_text())


def whole_of(folder: Path, name: str, tp: int) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{name}.{place}.pt") for place in range(tp)]


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found[name]
        assert other.dtype == value.dtype and torch.equal(other, value), name


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
def test_a_run_goes_on(tmp_path: Path, kind: str) -> None:
    steps = ("--steps", str(STEPS))
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", "whole", 4, 2, kind, *steps)
    run(tmp_path, "dead", 4, 2, kind, *steps, "--die-at", "5", dies=True)
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (2, 4)
    resumed = run(tmp_path, "resumed", 4, 2, kind, *steps, "--resume")
    for step, loss in resumed["losses"].items():
        assert whole["losses"][step] == loss, step
    assert len(resumed["losses"]) == STEPS - saved
    for found, wanted in zip(
        whole_of(tmp_path, "resumed", 2), whole_of(tmp_path / "whole", "whole", 2), strict=True
    ):
        same(found, wanted)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found = dist_checkpointing.load_plain_tensors(path)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 1), (4, 4), (2, 2), (4, 1)])
def test_another_cut_of_a_run_that_was_killed_has_the_same_state(
    tmp_path: Path, world: int, tp: int
) -> None:
    kind = "fully_reshardable"
    run(tmp_path, "dead", 4, 2, kind, "--steps", str(STEPS), "--die-at", "5", dies=True)
    saved = (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()
    run(tmp_path, "other", world, tp, kind, "--resume")
    wanted = tensors_of(tmp_path / "checkpoints" / f"iter_{saved}")
    assert any("exp_avg" in name for name in wanted)
    same(tensors_of(tmp_path / "other.again"), wanted)


@pytest.mark.parametrize("world", [2, 6])
def test_another_number_of_replicas_has_the_same_state(tmp_path: Path, world: int) -> None:
    kind = "dp_reshardable"
    run(tmp_path, "first", 4, 2, kind, "--steps", "2")
    run(tmp_path, "other", world, 2, kind, "--resume")
    for found, wanted in zip(
        whole_of(tmp_path, "other", 2), whole_of(tmp_path, "first", 2), strict=True
    ):
        same(found, wanted)
