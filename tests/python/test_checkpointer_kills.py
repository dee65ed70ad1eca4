"""A run under a Checkpointer that is killed again and again goes on as if it never was."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from launch import HERE, warm

import torch_ckpt

STEPS = 400


def started(root: Path, steps: int, log: Path) -> int:
    arguments = [str(HERE / "checkpointer_run.py"), str(root), str(steps), str(log)]
    return warm().start(arguments, {}, log.with_suffix(".out"), log.with_suffix(".err"), HERE)


def lines_of(log: Path) -> list[tuple[int, str]]:
    text = log.read_text() if log.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [(int(step), loss) for step, loss in (line.split() for line in whole)]


def test_a_run_that_is_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = tmp_path / "whole.log"
    assert warm().wait(started(tmp_path / "whole", STEPS, whole), 240) == 0
    wanted = dict(lines_of(whole))
    assert list(wanted) == list(range(1, STEPS + 1))

    rng = random.Random(4)
    log, root = tmp_path / "killed.log", tmp_path / "killed"
    kills = 0
    while kills < 6:
        before = len(lines_of(log))
        pid = started(root, STEPS, log)
        # So many steps later, wherever that is in a save.
        until = before + rng.randint(2, STEPS // 8)
        deadline = time.monotonic() + 120
        while len(lines_of(log)) < until and time.monotonic() < deadline:
            time.sleep(rng.random() / 100)
        subprocess.run(["kill", "-9", str(pid)], check=False)
        status = warm().wait(pid, 120)
        assert status == -9, log.with_suffix(".err").read_text()
        kills += 1
        # What is there is whole, the newest and the best.
        directory = torch_ckpt.CheckpointDirectory(root, best="loss")
        for step in directory.steps():
            torch_ckpt.Checkpoint(directory.path(step)).verify()
    assert warm().wait(started(root, STEPS, log), 240) == 0, log.with_suffix(".err").read_text()
    found = lines_of(log)
    assert {step for step, _ in found} == set(wanted)
    assert all(wanted[step] == loss for step, loss in found)
    # The same checkpoints stay, and nothing else.
    assert sorted(path.name for path in root.iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    assert (root / "BEST").read_text() == (tmp_path / "whole/BEST").read_text()
