"""States for which there is no memory: streamed, or refused."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from async_writers import (
    BLOCKING,
    MARKS,
    MIB,
    FailingWriter,
    GatedWriter,
    async_save,
    memory,
)
from safetensors.torch import load_file
from sample_states import load_ours
from torch.distributed.checkpoint.staging import StagingOptions

import torch_ckpt
from torch_ckpt import PinnedMemoryStager

pytestmark = MARKS


def big(value: int) -> dict[str, Any]:
    return {"w": torch.full((8 * MIB,), value, dtype=torch.uint8), "step": value}


def test_a_state_that_does_not_fit_is_written_from_where_it_is(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager(BLOCKING, memory_budget="4MiB", over_budget="stream")
    state = big(7)
    opened = threading.Timer(0.3, gate.set)
    opened.start()
    save = async_save(state, storage_writer=GatedWriter(tmp_path / "c"), async_stager=stager)
    state["w"].fill_(1)  # it has been written when the call returns
    state["step"] = 1
    assert gate.is_set()
    save.result(20)
    assert load_ours(tmp_path / "c", big(0))["step"] == 7
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert (load_file(file)["w"] == 7).all()
    assert save.stats.staged_bytes is None
    assert memory()["mapped"] <= 4 * MIB


def test_a_state_that_does_not_fit_beside_the_trainer(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager(StagingOptions(), memory_budget="4MiB", over_budget="stream")
    state = big(7)
    save = async_save(state, storage_writer=GatedWriter(tmp_path / "c"), async_stager=stager)
    with pytest.raises(concurrent.futures.TimeoutError):
        save.staging_completion.result(0.2)
    gate.set()
    save.staging_completion.result(20)
    state["w"].fill_(1)
    save.result(20)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert (load_file(file)["w"] == 7).all()


def test_writers_that_do_not_say_when_they_have_written(tmp_path: Path) -> None:
    stager = PinnedMemoryStager(BLOCKING, memory_budget="4MiB", over_budget="stream")
    state = big(7)
    save = async_save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), async_stager=stager
    )
    assert save.staging_completion.done()
    state["w"].fill_(1)
    save.result(20)
    target = big(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    assert (target["w"] == 7).all()


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner])
def test_a_streamed_save_that_fails_lets_the_trainer_go(tmp_path: Path, planner: Any) -> None:
    stager = PinnedMemoryStager(BLOCKING, memory_budget="4MiB", over_budget="stream")
    (tmp_path / "file").write_text("")
    save = async_save(
        big(7),
        checkpoint_id=tmp_path / "file" / "below",  # fails while planning
        async_stager=stager,
        planner=planner and planner(),
    )
    assert save.exception(20) is not None
    save = async_save(big(7), storage_writer=FailingWriter(tmp_path / "c"), async_stager=stager)
    assert save.exception(20) is not None


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, gate: threading.Event) -> None:
    stager = PinnedMemoryStager(BLOCKING, memory_budget="8MiB", over_budget="raise")
    first = async_save(big(1), storage_writer=GatedWriter(tmp_path / "1"), async_stager=stager)
    began = time.perf_counter()
    with pytest.raises(torch_ckpt.ExhaustedError, match="rank 0: .*in use"):
        async_save(big(2), checkpoint_id=tmp_path / "2", async_stager=stager, on_busy="overlap")
    assert time.perf_counter() - began < 10
    gate.set()
    first.result(20)
    async_save(big(2), checkpoint_id=tmp_path / "2", async_stager=stager).result(20)
    stager = PinnedMemoryStager(BLOCKING, memory_budget="4MiB")
    with pytest.raises(torch_ckpt.ExhaustedError, match="more than the host memory budget"):
        async_save(big(3), checkpoint_id=tmp_path / "3", async_stager=stager)
