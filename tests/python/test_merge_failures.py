"""Consolidations by several ranks, one of which is killed or interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_scripts
from merging_rank import ENDED
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt import _core

WORLD = 4  # one is no neighbour of rank 1


def launch(source: Path, out: Path, what: str) -> list[tuple[int, str]]:
    """Exit status and output of every rank."""
    return run_scripts("merging_rank.py", WORLD, [str(source), str(out), what])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "kill early", "kill the first", "stop", "interrupt"])
def test_a_rank_that_ends_in_the_middle_ends_the_others(tmp_path: Path, what: str) -> None:
    content = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    torch_ckpt.save(content, checkpoint_id=tmp_path / "in")
    began = time.monotonic()
    done = launch(tmp_path / "in", tmp_path / "out", what)
    assert time.monotonic() - began < 100, "the others waited for the timeout"
    hurt = 0 if what == "kill the first" else 1
    others = [each for rank, each in enumerate(done) if rank != hurt]
    assert all(status == ENDED for status, _ in others), done
    if what == "interrupt":
        assert done[1] == (ENDED, "KeyboardInterrupt\n")
        said = ("CancelledError", "rank 1")
    else:
        assert done[hurt][0] == (ENDED if what == "stop" else -9)
        # Rank 0 is where the store is.
        said = (
            ("the process group's store, which does not answer",) if hurt == 0 else ("rank 1: is",)
        )
        for mark in tmp_path.glob("out.*"):
            mark.unlink()
    assert all(word in text for _, text in others for word in said), done
    assert not (tmp_path / "out").exists()
    kept = what in ("kill", "stop", "kill the first")
    if what != "kill early":
        assert (tmp_path / ".out.torch_ckpt-stage").exists() == kept
    again = launch(tmp_path / "in", tmp_path / "out", "nothing")
    assert [status for status, _ in again] == [0] * WORLD
    # What the others of a rank that was killed have written is not written again.
    assert (again[0][1] != "0 kept\n") == kept, again
    saved = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert torch.equal(saved["w"], content["w"])
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.slow
def test_interrupted_while_it_is_committed(tmp_path: Path) -> None:
    """It is there, and nobody but the interrupted rank says otherwise."""
    torch_ckpt.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in")
    done = launch(tmp_path / "in", tmp_path / "out", "interrupt at the end")
    assert done[1] == (ENDED, "KeyboardInterrupt\n")
    assert all(status == 0 for rank, (status, _) in enumerate(done) if rank != 1), done
    torch_ckpt.Checkpoint(tmp_path / "out").verify()


def test_cancelled_without_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ckpt.save({"w": torch.arange(1000)}, checkpoint_id=tmp_path / "in")
    call = _core.call
    cancelled = threading.Event()

    def waiting(request: dict[str, Any]) -> Any:
        if request["op"] == "merge":
            cancelled.wait(20)
        return call(request)

    monkeypatch.setattr(_core, "call", waiting)
    future = torch_ckpt.consolidate_safetensors_files_on_every_rank(
        tmp_path / "in", tmp_path / "out", None, background=True
    )
    assert future is not None and future.cancel()
    time.sleep(0.3)  # until it has looked
    cancelled.set()
    assert isinstance(future.exception(20), torch_ckpt.CancelledError)
    assert not future.cancel()
    assert os.listdir(tmp_path) == ["in"]


def test_a_cancel_that_comes_too_late_is_none(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.arange(1000)}, checkpoint_id=tmp_path / "in")
    for number in range(10):
        future = torch_ckpt.consolidate_safetensors_files_on_every_rank(
            tmp_path / "in", tmp_path / str(number), None, background=True
        )
        assert future is not None
        future.cancel()
        error = future.exception(20)
        assert error is None or isinstance(error, torch_ckpt.CancelledError)
        assert (tmp_path / str(number)).exists() == (error is None)


HALF = """
import os, signal, sys
from torch_ckpt import _core
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.merge import merge_request
request = merge_request(
    *sys.argv[1:], None, 1, strict=True, verify=True, max_shard_size=None, naming="dcp",
    policy=DtypePolicy(os.environ.get("DTYPE")), memory_budget="1GiB", key_mapping=None,
)
begun = _core.call({"op": "merge_begin", **request})
part = {key: begun[key] for key in ("staging", "ids", "input_save_id", "written")}
_core.call({"op": "merge_part", **request, **part, "part": 0, "parts": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def written_bytes() -> int:
    """By this process until now, to whatever."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise AssertionError("no wchar")


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "foreign"])
@pytest.mark.parametrize("what", ["whole", "torn", "log lost", "another merge", "other input"])
def test_after_a_kill_what_is_there_is_not_written_again(
    tmp_path: Path, what: str, stock: bool
) -> None:
    content = {"w": torch.arange(1 << 22, dtype=torch.float32), "v": torch.ones(1000)}
    source, out = tmp_path / "in", tmp_path / "out"
    torch_ckpt.save(content, checkpoint_id=source)
    if stock:
        for name in ("torch_ckpt.json", "torch_ckpt.catalog"):
            (source / name).unlink()
    done = subprocess.run([sys.executable, "-c", HALF, str(source), str(out)], check=False)
    assert done.returncode == -9
    assert not out.exists()
    staging = tmp_path / ".out.torch_ckpt-stage"
    data = next(staging.glob("model-*.safetensors.*"))
    if what == "torn":
        with data.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"\x01\x02\x03")
    elif what == "log lost":
        next(staging.glob("merge_log.*")).write_text("0 0 4096 1 2\n")
    elif what == "other input":
        content["v"] = torch.zeros(1000)
        torch_ckpt.save(content, checkpoint_id=source)
        if stock:
            for name in ("torch_ckpt.json", "torch_ckpt.catalog"):
                (source / name).unlink()
    before = written_bytes()
    size = "1KB" if what == "another merge" else None
    torch_ckpt.consolidate_safetensors_files(source, out, None, max_shard_size=size)
    share = (written_bytes() - before) / sum(value.nbytes for value in content.values())
    if what == "whole":
        assert 0.45 < share < 0.6, share
    elif what == "torn":
        assert 0.6 < share < 0.9, share  # one piece of it more
    else:
        assert share > 0.99, share
    saved: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        saved.update(load_file(file))
    assert saved.keys() == content.keys()
    for name, value in content.items():
        assert torch.equal(saved[name], value)
    torch_ckpt.Checkpoint(out).verify()
    assert not staging.exists()


def kill_in_the_middle(source: Path, out: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HALF, str(source), str(out)], check=False)
    assert done.returncode == -9 and not out.exists()


def test_after_a_kill_other_names_begin_anew(tmp_path: Path) -> None:
    """Two tensors whose names are exchanged: the headers are the same, byte for byte."""
    content = {"a": torch.arange(1 << 20), "b": -torch.arange(1 << 20)}
    other = {"a": "b", "b": "a"}
    torch_ckpt.save(content, checkpoint_id=tmp_path / "in")
    kill_in_the_middle(tmp_path / "in", tmp_path / "out")
    torch_ckpt.consolidate_safetensors_files(
        tmp_path / "in", tmp_path / "out", None, key_mapping=other.__getitem__
    )
    saved = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for name, value in content.items():
        assert torch.equal(saved[other[name]], value), name


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_after_a_kill_what_was_read_is_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """The run that was killed had not come to compare what it had read with its digests."""
    torch_ckpt.save(
        {"w": torch.arange(1 << 21, dtype=torch.float32)}, checkpoint_id=tmp_path / "in"
    )
    if dtype is not None:
        monkeypatch.setenv("DTYPE", dtype)
    kill_in_the_middle(tmp_path / "in", tmp_path / "out")
    data = next((tmp_path / "in").glob("*.safetensors"))
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 4)  # of the half that is written
        file.write(b"\xff\xff\xff")
    with pytest.raises(torch_ckpt.CorruptError, match="do not match"):
        torch_ckpt.consolidate_safetensors_files(
            tmp_path / "in", tmp_path / "out", None, dtype=dtype
        )
    assert not (tmp_path / "out").exists()
