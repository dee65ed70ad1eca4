"""opening.py load|diff CHECKPOINT CHECKPOINT: a process that opens files, to be counted.

It loads all of the first, with casts that cross in waves of 1 MiB, or compares the two in as much
memory as `diff` takes at least: in several waves too. What counts is between the marks of
benchmarks/opens.py.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import torch_ckpt  # noqa: E402
from benchmarks import opens  # noqa: E402
from torch_ckpt.cli import cli  # noqa: E402
from torch_ckpt.dcp.read import read_tensors  # noqa: E402

SHARDS, TENSORS, COLUMNS = 64, 6, 8192  # 2 MiB a tensor


def whole(number: int) -> torch.Tensor:
    """What tensor `t{number}` of both checkpoints has; a row of it is in each shard."""
    return torch.arange(SHARDS * COLUMNS, dtype=torch.int32).view(SHARDS, COLUMNS) + number


def load(path: str) -> None:
    read_tensors.WAVE_BYTES = 1 << 20
    into = {f"t{i}": torch.zeros(SHARDS, COLUMNS, dtype=torch.int64) for i in range(TENSORS)}
    opens.mark(opens.BEGIN)
    torch_ckpt.load(into, path)
    opens.mark(opens.END)
    for number in range(TENSORS):
        assert torch.equal(into[f"t{number}"], whole(number).long())


def diff(path: str, other: str) -> None:
    opens.mark(opens.BEGIN)
    cli(["diff", path, other, "--memory-budget", "32MiB", "-q"], standalone_mode=False)
    opens.mark(opens.END)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # stock's shards say no shapes
    load(sys.argv[2]) if sys.argv[1] == "load" else diff(*sys.argv[2:])
