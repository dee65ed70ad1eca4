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
BESIDE = [("staged", 2), ("written", 0), ("committed", 0)]
CASES = [
    *(("save", *each, "kill") for each in SAVE),
    *(("save_beside", *each, "kill") for each in BESIDE),
    *(("load", *each, "kill") for each in LOAD),
    # For longer than others wait.
    *(("save", "written", 2, "stop"), ("load", "asked", 1, "stop"), ("load", "sent", 0, "stop")),
]


def check(folder: Path, victim: int) -> None:
    for rank in range(WORLD):
        if rank == victim:
            continue
        report = json.loads((folder / f"{rank}.json").read_text())
        assert report["said"].startswith("CheckpointingException: "), report
        assert re.search(rf"rank {victim}\b|ranks \[{victim}\]", report["said"]), report
        assert report["seconds"] < 60, report


def is_whole(folder: Path) -> None:
    """The checkpoint that was there before, and a save finds nothing in its way."""
    path = folder / "c"
    loaded = dist_checkpointing.load_plain_tensors(path)
    assert loaded["step"] == 1
    assert torch.equal(loaded["all"], torch.full((500,), 1.0))
    own = torch.cat([torch.full((1000,), 1.0 + rank) for rank in range(WORLD)])
    assert torch.equal(loaded["own"], own)
    dist_checkpointing.save({"again": 5}, path)
    assert dist_checkpointing.load({}, path) == {"again": 5}


STOPS = [
    *(("save", *each, "stop") for each in SAVE),
    *(("save_beside", *each, "stop") for each in BESIDE),
    *(("load", *each, "stop") for each in LOAD),
]


@pytest.mark.parametrize(
    ("job", "phase", "victim", "how"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.campaign) for each in STOPS)],
)
def test_a_rank_that_dies_or_is_stopped(
    tmp_path: Path, job: str, phase: str, victim: int, how: str
) -> None:
    ended = run_scripts("dist_rank.py", WORLD, [str(tmp_path), job, phase, str(victim), how])
    assert [status for status, _ in ended] == [
        -9 if rank == victim else 0 for rank in range(WORLD)
    ], ended
    check(tmp_path, victim)
    is_whole(tmp_path)
