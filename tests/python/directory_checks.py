"""What the tests of CheckpointDirectory look at."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from directory_saver import state

from torch_ckpt import CheckpointDirectory


def loaded(directory: CheckpointDirectory, step: int | None = None) -> int:
    """The step that was loaded, after a look at what came."""
    target = {"w": torch.zeros(300, 7), "text": "", "step": -1}
    found = directory.load(target, step)
    wanted = state(found)
    assert torch.equal(target.pop("w"), wanted.pop("w"))
    assert target == wanted
    return found


def visible(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def latest_file(root: Path) -> int:
    match = re.fullmatch(r"step-(\d+)\n", (root / "LATEST").read_text())
    assert match is not None
    return int(match[1])


def check(root: Path, saved: int, keep: int) -> int:
    """What holds at every moment, when steps 1 to `saved` have been committed for sure. Returns the
    newest step, 0 if there is none."""
    directory = CheckpointDirectory(root)
    steps = directory.steps()
    assert visible(root) == steps, "a child is not whole"
    assert len(steps) >= min(keep, saved), "deleted before a newer one was committed"
    if not steps:
        assert not (root / "LATEST").exists()
        return 0
    for step in steps:
        assert loaded(directory, step) == step
    assert directory.latest() == directory.path(steps[-1])
    assert steps[-1] >= saved
    if (root / "LATEST").exists():
        assert latest_file(root) in steps  # behind, where kills came before it was written
    else:  # every saver was killed before it wrote LATEST, so none got as far as deleting
        assert steps == list(range(1, steps[-1] + 1))
    return steps[-1]
