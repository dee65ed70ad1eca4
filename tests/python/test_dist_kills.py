"""torch_ckpt.megatron.dist_checkpointing where a rank dies, or is stopped, in any phase."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launch import run_scripts

from torch_ckpt.megatron import dist_checkpointing

WORLD = 3
SAVE = [("said", 1), ("settled", 0), ("collected", 2), ("written", 1), ("committed", 0)]
LOAD = [
    *(("asked", 2), ("checked", 0), ("placed", 1), ("read", 0), ("read", 2)),
    *(("sent", 1), ("answered", 2)),
]
CASES = [
    *(("save", *each) for each in SAVE),
    *(("save_beside", *each) for each in [("staged", 2), ("written", 0), ("committed", 0)]),
    *(("load", *each) for each in LOAD),
]


def check(folder: Path, victim: int, within: float) -> None:
    for rank in range(WORLD):
        if rank == victim:
            continue
        report = json.loads((folder / f"{rank}.json").read_text())
        assert report["said"].startswith("CheckpointingException: "), report
        assert re.search(rf"rank {victim}\b|ranks \[{victim}\]", report["said"]), report
        assert report["seconds"] < within, report


def is_whole(folder: Path, values: tuple[float, ...]) -> None:
    path = folder / "c"
    loaded = dist_checkpointing.load_plain_tensors(path)
    value = float(loaded["step"])
    assert value in values
    assert torch.equal(loaded["all"], torch.full((500,), value))
    own = torch.cat([torch.full((1000,), value + rank) for rank in range(WORLD)])
    assert torch.equal(loaded["own"], own)
    dist_checkpointing.save({"again": 5}, path)  # nothing is in its way
    assert dist_checkpointing.load({}, path) == {"again": 5}


@pytest.mark.parametrize(("job", "phase", "victim"), CASES)
def test_a_rank_that_dies(tmp_path: Path, job: str, phase: str, victim: int) -> None:
    ended = run_scripts("dist_rank.py", WORLD, [str(tmp_path), job, phase, str(victim), "kill"])
    assert [status for status, _ in ended] == [
        -9 if rank == victim else 0 for rank in range(WORLD)
    ], ended
    check(tmp_path, victim, 60)
    is_whole(tmp_path, (1.0,))


@pytest.mark.parametrize(
    ("job", "phase", "victim"), [("save", "written", 2), ("load", "asked", 1), ("load", "sent", 0)]
)
def test_a_rank_that_is_stopped(tmp_path: Path, job: str, phase: str, victim: int) -> None:
    """For longer than others wait."""
    ended = run_scripts("dist_rank.py", WORLD, [str(tmp_path), job, phase, str(victim), "stop"])
    assert [status for status, _ in ended] == [
        -9 if rank == victim else 0 for rank in range(WORLD)
    ], ended
    check(tmp_path, victim, 100)
    is_whole(tmp_path, (1.0,))
