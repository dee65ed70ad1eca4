"""A Checkpointer, and load_model, where a rank dies or is stopped in any phase."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launch import run_scripts
from training_rank import whole

import torch_ckpt

WORLD = 3
SAVE = [("began", 1), ("began", 0), ("said", 2), ("written", 1), ("committed", 0)]
BESIDE = [("began", 2), ("said", 0), ("staged", 2), ("written", 0), ("committed", 0)]
LOAD = [
    *(("asked", 1), ("named", 0), ("opened", 2), ("looked", 0)),
    *(("read", 1), ("read", 0), ("given", 2)),
]
MODEL = [("planned", 1), ("read", 2)]
EVERY = [
    *(("save", *each) for each in SAVE),
    *(("save_beside", *each) for each in BESIDE),
    *(("load", *each) for each in LOAD),
    *(("load_model", *each) for each in MODEL),
]
# For longer than others wait.
STOPPED = [("save", "written", 2), ("save_beside", "said", 1), ("load", "opened", 1)]


@pytest.mark.parametrize(
    ("job", "phase", "victim", "how"),
    [
        *((*each, "kill") for each in EVERY),
        *((*each, "stop") for each in STOPPED),
        *(
            pytest.param(*each, "stop", marks=pytest.mark.campaign)
            for each in EVERY
            if each not in STOPPED
        ),
    ],
)
def test_a_rank_that_dies_or_is_stopped(
    tmp_path: Path, job: str, phase: str, victim: int, how: str
) -> None:
    ended = run_scripts("training_rank.py", WORLD, [str(tmp_path), job, phase, str(victim), how])
    assert [status for status, _ in ended] == [
        -9 if rank == victim else 0 for rank in range(WORLD)
    ], ended
    for rank in set(range(WORLD)) - {victim}:
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert re.search(rf"rank {victim}\b|ranks \[{victim}\]", report["said"]), report
        assert report["seconds"] < 60, report
    # The step that was there loads, on one rank, and the next save finds nothing in its way.
    root, model = tmp_path / "run", whole(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with torch_ckpt.Checkpointer(root, model, optimizer, background=False) as checkpointer:
        with pytest.warns(match="random states"):
            assert checkpointer.load() == 1
        assert model[0].weight[0, 0] < 1.0 and optimizer.param_groups[0]["lr"] == 0.1
        checkpointer.save(2)
        assert checkpointer.load() == 2
        assert checkpointer.directory.steps() == [1, 2]
    torch_ckpt.Checkpoint(root / "step-1").verify()
    assert {path.name for path in root.iterdir()} == {"LATEST", "step-1", "step-2"}
