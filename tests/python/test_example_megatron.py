"""examples/megatron trains, dies, goes on with other ranks, and exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import PACKAGE
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron" / "train.py"


def launch(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(ranks), EXAMPLE, *map(str, words)),
    ]
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def loss(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"step 60: loss ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


@pytest.mark.campaign
def test_it_goes_on_with_other_ranks(tmp_path: Path) -> None:
    whole = loss(launch(2, tmp_path / "whole", "--export", tmp_path / "model-2"))
    killed = launch(2, tmp_path / "out", "--die-at", 37)
    assert killed.returncode != 0
    done = launch(4, tmp_path / "out", "--export", tmp_path / "model-4")
    assert re.search(r"goes on at step (20|30) on 4 ranks", done.stdout), done.stdout
    assert loss(done) == pytest.approx(whole, rel=1e-3)
    models = [load_file(tmp_path / f"model-{n}" / "model.safetensors") for n in (2, 4)]
    assert models[0].keys() == models[1].keys() == {"model.up", "model.down", "model.bias"}
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], atol=1e-3)
