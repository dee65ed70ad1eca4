"""Saves by stock's writer of torch 2.13.0 that refuse plain states or, killed, take the checkpoint
they were to replace with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_states import FAILED, STOCK_213, assert_same, load_ours, load_stock, save
from stock_damage import header_of

from torch_ckpt import HuggingFaceStorageWriter

FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.mark.parametrize("case", ["flat", "other shape", "other type"])
def test_two_views_of_one_memory(tmp_path: Path, case: str) -> None:
    base = torch.randn(8, 6)
    view = {
        "flat": base.view(-1),
        "other shape": base.view(6, 8),
        "other type": base.view(torch.int32),
    }[case]
    state = {"base": base, "view": view}
    save(state, HuggingFaceStorageWriter(tmp_path / "ours", save_distributed=True))
    assert_same(load_ours(tmp_path / "ours", state), state)
    if STOCK_213:
        with pytest.raises(FAILED, match="share memory"):
            save(state, dcp.HuggingFaceStorageWriter(str(tmp_path / "s"), save_distributed=True))


SAVE_OVER_AND_DIE = """
import os, signal, sys, torch
import torch.distributed.checkpoint as dcp
import torch_ckpt
path, kind, when = sys.argv[1:]
make = {"ours": torch_ckpt.HuggingFaceStorageWriter, "stock": dcp.HuggingFaceStorageWriter}[kind]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Dies(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "b":
            die()
        return super().resolve_data(item)

def save(value, writer, planner=None):
    state = {name: torch.full((1000,), value) for name in ("a", "b")}
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)

mapping = {"a": 1, "b": 2}
save(1.0, make(path, mapping))
writer = make(path, mapping)
if when == "in the second file":
    save(2.0, writer, Dies())
else:
    create_stream = writer.fs.create_stream

    def before_the_second(name, mode):
        if "model-00002" in str(name):
            die()
        return create_stream(name, mode)

    writer.fs.create_stream = before_the_second
    save(2.0, writer)
"""


def save_over_and_die(path: Path, kind: str, when: str) -> None:
    """Save ones over `path`, then twos, killed when the first of two files is written."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE_OVER_AND_DIE, str(path), kind, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def both(a: float, b: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(a)), "b": torch.full((1000,), float(b))}


def test_a_kill_of_a_save_over_a_checkpoint(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    save_over_and_die(ours, "ours", "in the second file")
    assert_same(load_ours(ours, both(0, 0)), both(1, 1))
    if not STOCK_213:
        return
    save_over_and_die(stock, "stock", "in the second file")
    with pytest.raises(FAILED):
        load_stock(stock, both(0, 0))
    # Nor is the old checkpoint left: the one file is of the new, the other one is empty.
    assert header_of(stock / FILES[0])[1]["a"]["shape"] == [1000]
    assert (stock / FILES[0]).read_bytes().endswith(both(2, 2)["a"].numpy().tobytes())
    assert (stock / FILES[1]).stat().st_size == 0


def test_a_kill_between_two_files_leaves_what_looks_whole(tmp_path: Path) -> None:
    """The new values of the one file and the old of the other, and no error at all."""
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    save_over_and_die(tmp_path / "c", "stock", "between the files")
    assert_same(load_stock(tmp_path / "c", both(0, 0)), both(2, 1))
