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
from torch_ckpt.native import core

WORLD = 4  # one is no neighbour of rank 1


def launch(source: Path, out: Path, what: str) -> list[tuple[int, str]]:
    """Exit status and output of every rank."""
    return run_scripts("merging_rank.py", WORLD, [str(source), str(out), what])


def merges_once_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge begins when its job has been cancelled, however late that is."""
    call = core.call
    cancelled = threading.Event()

    def waiting(request: dict[str, Any]) -> Any:
        if request["op"] == "merge":
            assert cancelled.wait(60)
        answer = call(request)
        if request["op"] == "job_cancel":
            cancelled.set()
        return answer

    monkeypatch.setattr(core, "call", waiting)


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
    # Rank 0 removes it, if it is there.
    assert (tmp_path / ".out.torch_ckpt-stage").exists() == (what == "kill the first")
    again = launch(tmp_path / "in", tmp_path / "out", "nothing")
    assert [status for status, _ in again] == [0] * WORLD
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
    merges_once_cancelled(monkeypatch)
    future = torch_ckpt.consolidate_safetensors_files_on_every_rank(
        tmp_path / "in", tmp_path / "out", None, background=True
    )
    assert future is not None and future.cancel()
    assert isinstance(future.exception(20), torch_ckpt.CancelledError)
    assert not future.cancel()
    assert os.listdir(tmp_path) == ["in"]


def test_an_error_of_the_callback_ends_a_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ckpt.save({"w": torch.arange(1000)}, checkpoint_id=tmp_path / "in")
    merges_once_cancelled(monkeypatch)

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError(threading.current_thread().name)

    with pytest.raises(ZeroDivisionError, match="torch_ckpt-progress"):
        torch_ckpt.consolidate_safetensors_files(
            tmp_path / "in", tmp_path / "out", None, progress=fail
        )
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
from torch_ckpt.native import core
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.merge import merge_request
request = merge_request(
    *sys.argv[1:], None, 1, strict=True, verify=True, max_shard_size=None, naming="dcp",
    policy=DtypePolicy(None), memory_budget="1GiB", key_mapping=None, overwrite=True,
)
begun = core.call({"op": "merge_begin", **request})
share = {key: begun[key] for key in ("staging", "ids", "input_identity")}
core.call({"op": "merge_share", **request, **share, "share": 0, "shares": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("into", ["a new directory", "an earlier output", "the input"])
def test_a_killed_one_is_in_nobodys_way(tmp_path: Path, into: str) -> None:
    content = {"w": torch.arange(1 << 20, dtype=torch.float32), "v": torch.ones(1000)}
    source = tmp_path / "in"
    out = source if into == "the input" else tmp_path / "out"
    torch_ckpt.save(content, checkpoint_id=source)
    if into == "an earlier output":
        torch_ckpt.save({"old": torch.ones(3)}, checkpoint_id=out)
    before = sorted(os.listdir(out)) if out.exists() else []
    done = subprocess.run([sys.executable, "-c", HALF, str(source), str(out)], check=False)
    assert done.returncode == -9
    staging = tmp_path / ".out.torch_ckpt-stage"
    if into != "a new directory":
        staging = out / ".torch_ckpt-stage"
        torch_ckpt.Checkpoint(out).verify()  # what was there is
    written = [os.stat(file) for file in staging.glob("*/model-*.safetensors.*")]
    assert any(stat.st_blocks for stat in written)

    torch_ckpt.consolidate_safetensors_files(source, out, None, overwrite=True)
    saved = load_file(out / "model-00001-of-00001.safetensors")
    assert saved.keys() == content.keys()
    for name, value in content.items():
        assert torch.equal(saved[name], value)
    torch_ckpt.Checkpoint(out).verify()
    assert not staging.exists()
    kept = set(before) if into == "the input" else set()
    assert set(os.listdir(out)) == kept | {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "torch_ckpt.catalog",
        "torch_ckpt.json",
    }
