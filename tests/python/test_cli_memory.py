"""torch-ckpt diff and show take a bounded memory, whatever the size of the checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import HERE, PACKAGE

import torch_ckpt

MIB = 1 << 20
BUDGET = 64 * MIB  # of diff: the least that it takes
# Prints by how much memory rose at most in all diffs, and in all shows: what the allocator keeps of
# one counts for the next. The first commands, of little, load the code.
PROGRAM = """
import contextlib, json, os, sys
from host_memory import peak
import torch
from torch_ckpt.cli import cli

def command(*arguments):
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            cli(list(arguments), standalone_mode=False)
        except SystemExit as left:
            return left.code
        return 0

commands = json.loads(sys.argv[1])
for each in commands["first"]:
    command(*each)
statuses = []
grown = {
    name: peak(lambda: statuses.extend(command(*each) for each in commands[name]))
    for name in ("diff", "show")
}
grown["held"] = peak(lambda: len(b"x" * (256 << 20)))
print(json.dumps([grown, statuses]))
"""


def state(add: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """192 MiB of bfloat16, a half of it in one tensor, which alone is larger than the budget."""
    sizes = {"large": 48 * MIB, **{f"w{number}": 12 * MIB for number in range(4)}}
    return {
        name: torch.arange(size, dtype=torch.int32)
        .remainder_(1000)
        .add_(add)
        .to(dtype)
        .view(1024, -1)
        for name, size in sizes.items()
    }


@pytest.mark.slow
def test_diff_and_show_of_more_than_the_budget(tmp_path: Path) -> None:
    stored = {"torch": tmp_path / "a.pt", "ours": tmp_path / "b", "dcp": tmp_path / "c"}
    torch.save(state(0, torch.bfloat16), stored["torch"])
    torch_ckpt.save(state(0, torch.bfloat16), stored["ours"], no_dist=True)
    dcp.save(
        state(1, torch.float32), storage_writer=dcp.FileSystemWriter(stored["dcp"]), no_dist=True
    )
    little = [tmp_path / f"little{number}.pt" for number in range(2)]
    for number, path in enumerate(little):
        torch.save({"w": torch.full((100,), float(number))}, path)

    def diff(*arguments: object) -> list[str]:
        return ["diff", *map(str, arguments), "--memory-budget", str(BUDGET)]

    commands = {
        "first": [diff(*little), diff(*little, "--atol", "0.5"), ["show", str(little[0]), "w"]],
        "diff": [
            diff(stored["torch"], stored["ours"]),
            diff(stored["ours"], stored["dcp"]),
            diff(stored["ours"], stored["dcp"], "--atol", "0.5"),
        ],
        "show": [["show", str(stored["torch"]), "large"]],
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)])},
    )
    assert done.returncode == 0, done.stderr
    grown, statuses = json.loads(done.stdout)
    assert statuses == [0, 4, 4, 0]
    assert grown["diff"] <= BUDGET, grown
    assert grown["show"] <= 96 * MIB, grown
    assert grown["held"] > 200 * MIB  # the measure sees what is held
