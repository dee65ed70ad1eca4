"""PinnedMemoryStager: what is staged is the state as it was, in memory that nobody else has."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from async_writers import BLOCKING, MIB, FailingWriter, memory
from safetensors.torch import load_file
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter, PinnedMemoryStager
from torch_ckpt.native import core
from torch_ckpt.staging.staged_state import StagedState

# Whatever pytest makes of warnings: stock says that there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_stays_leased() -> Any:
    core.call({"op": "arena", "snapshots": True, "trim": True})
    yield
    deadline = time.monotonic() + 60  # stock's threads end by themselves
    while memory()["leased"] and time.monotonic() < deadline:
        gc.collect()  # torch 2.10 keeps the last state that it saved in a cycle
        time.sleep(0.01)
    assert memory()["leased"] == 0


def stage(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    staged = PinnedMemoryStager(BLOCKING, **{"timeout": 20, **options}).stage(state)
    assert isinstance(staged, dict)
    return staged


def test_stocks_default_config_works_without_cuda() -> None:
    stager = PinnedMemoryStager(StagingOptions())
    assert isinstance(stager, AsyncStager)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError):
            DefaultStager()
    for i in range(3):
        staged = stager.stage({"w": torch.full((5,), i)})
        assert isinstance(staged, Future)
        assert staged.result()["w"].tolist() == [i] * 5
    stager.close()
    assert isinstance(stager.stage({}), Future)
    stager.close()


def test_only_the_bytes_of_the_state_are_copied() -> None:
    storage = torch.arange(64 * MIB // 4, dtype=torch.int32)
    staged = stage({"row": storage[100:200], "tied": storage[100:200].view(10, 10)})
    assert memory()["leased"] == 2 * MIB  # the least that is leased
    assert staged["row"].data_ptr() == staged["tied"].data_ptr()
    assert staged["row"].tolist() == list(range(100, 200))


def test_memory_is_used_again_and_never_while_it_is_leased() -> None:
    source = torch.zeros(8 * MIB, dtype=torch.uint8)
    first = stage({"w": source})
    source.fill_(1)
    second = stage({"w": source})
    assert memory()["leased"] == 16 * MIB
    assert first["w"].max() == 0
    assert second["w"].min() == 1
    del first
    assert memory()["leased"] == 8 * MIB
    for i in range(20):
        staged = stage({"w": source.fill_(i)})
        assert staged["w"].unique().tolist() == [i]
        assert second["w"].unique().tolist() == [1]
        assert memory()["mapped"] == 16 * MIB
        del staged


def test_a_tensor_keeps_the_memory_of_its_state() -> None:
    kept = stage({"a": torch.arange(100), "b": torch.ones(100)})["a"][10:20]
    assert memory()["leased"] == 2 * MIB
    other = stage({"a": torch.zeros(100), "b": torch.zeros(100)})
    assert kept.tolist() == list(range(10, 20))
    assert other["a"].sum() == 0


def test_a_state_that_does_not_fit_is_refused_before_anything_is_touched() -> None:
    source = torch.zeros(8 * MIB, dtype=torch.uint8)
    try:
        with pytest.raises(torch_ckpt.ExhaustedError, match="budget"):
            stage({"w": source}, memory_budget="4 MiB")
        first = stage({"w": source}, memory_budget="8MiB")
        assert isinstance(first, StagedState)
        with pytest.raises(torch_ckpt.ExhaustedError, match="in use"):
            stage({"w": source}, timeout=0)
        with pytest.raises(torch_ckpt.ExhaustedError, match="in use"):
            stage({"w": source}, timeout=0.05)
        release = threading.Timer(0.2, first.end)
        release.start()
        assert stage({"w": source})["w"].sum() == 0
        release.join()
    finally:
        core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "", "many", "-5 GB", "2 GiBB", "0"])
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="memory_budget"):
        PinnedMemoryStager(memory_budget=budget)


def test_a_budget_in_any_unit() -> None:
    try:
        for text, value in (
            (5, 5),
            ("5", 5),
            ("7B", 7),
            ("1.5 GB", 1_500_000_000),
            ("2GiB", 2 << 30),
            ("3 KiB", 3 << 10),
            ("1TB", 10**12),
        ):
            PinnedMemoryStager(memory_budget=text)
            assert memory()["budget"] == value
    finally:
        core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})


@pytest.mark.parametrize("config", [StagingOptions(), BLOCKING], ids=["overlapped", "blocking"])
def test_memory_that_was_prepared_is_taken(config: StagingOptions) -> None:
    source = {"w": torch.arange(8 * MIB, dtype=torch.uint8), "b": {"c": torch.ones(5)}}
    sizes: list[Any] = [source, 9 * MIB, "9MiB"]
    for prepare in sizes:
        core.call({"op": "arena", "snapshots": True, "trim": True})
        stager = PinnedMemoryStager(config, prepare=prepare)
        staged: Any = stager.stage(source)
        staged = staged.result() if isinstance(staged, Future) else staged
        assert memory()["mapped"] == 10 * MIB
        assert torch.equal(staged["w"], source["w"])
        del staged
        stager.close()
    stager = PinnedMemoryStager(prepare={})
    stager.close()


def test_memory_that_cannot_be_prepared_is_an_error_of_the_next_call() -> None:
    try:
        stager = PinnedMemoryStager(BLOCKING, prepare="5MiB", memory_budget="4MiB")
        with pytest.raises(torch_ckpt.ExhaustedError, match="budget"):
            stager.stage({"w": torch.ones(3)})
        assert stager.stage({"w": torch.ones(3)})["w"].sum() == 3  # type: ignore[index]
        with pytest.raises(torch_ckpt.ExhaustedError, match="budget"):
            PinnedMemoryStager(prepare="5MiB").close()
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="prepare"):
            PinnedMemoryStager(prepare="much")
    finally:
        core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})


def test_a_failure_in_the_background_is_the_futures() -> None:
    stager = PinnedMemoryStager(StagingOptions(), memory_budget=1)
    try:
        staged = stager.stage({"w": torch.ones(3)})
        assert isinstance(staged, Future)
        with pytest.raises(torch_ckpt.ExhaustedError):
            staged.result()
    finally:
        core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})
        stager.close()


WRITERS = {
    "ours": lambda path: HuggingFaceStorageWriter(path, save_distributed=True),
    "ours, final": lambda path: HuggingFaceStorageWriter(path, {"a": 1, "b.c": 2}),
    "stock": lambda path: dcp.HuggingFaceStorageWriter(str(path)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("config", [StagingOptions(), BLOCKING], ids=["overlapped", "blocking"])
def test_async_saves_by_any_writer(tmp_path: Path, writer: str, config: StagingOptions) -> None:
    stager = PinnedMemoryStager(config)
    for step in range(3):
        state: dict[str, Any] = {"a": torch.full((5000, 300), step), "b": {"c": torch.ones(7)}}
        answer: Any = dcp.async_save(
            state, storage_writer=WRITERS[writer](tmp_path / str(step)), async_stager=stager
        )
        if not isinstance(answer, Future):
            answer.staging_completion.result()
            answer = answer.upload_completion
        state["a"].fill_(99)
        state["b"]["c"].zero_()
        answer.result()
        found: dict[str, torch.Tensor] = {}
        for file in (tmp_path / str(step)).glob("*.safetensors"):
            found |= load_file(file)
        assert found["a"].unique().tolist() == [step]
        assert found["b.c"].tolist() == [1] * 7
    stager.close()


def test_an_ended_state_is_empty_and_not_somebody_elses() -> None:
    staged = stage({"a": {"b": torch.ones(4)}, "s": torch.tensor(1.0), "step": 3})
    assert isinstance(staged, StagedState)
    tensor = staged["a"]["b"]
    staged.end()
    staged.end()
    assert memory()["leased"] == 0
    assert tensor.shape == (0,)
    assert staged["step"] == 3


@pytest.fixture
def no_logs() -> Iterator[None]:
    """pytest keeps what DCP logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("config", [StagingOptions(), BLOCKING], ids=["overlapped", "blocking"])
@pytest.mark.usefixtures("no_logs")
def test_two_hundred_saves_leave_nothing_behind(tmp_path: Path, config: StagingOptions) -> None:
    state = {f"layer.{n}": torch.full((1000 * n,), n) for n in range(20)} | {"step": 1}
    stager = PinnedMemoryStager(config)

    threads = threading.active_count() + 1  # the stager's own

    def saves(count: int) -> tuple[int, int]:
        for _ in range(count):
            answer: Any = torch_ckpt.async_save(
                state, checkpoint_id=tmp_path / "c", async_stager=stager
            )
            (answer if isinstance(answer, Future) else answer.upload_completion).result()
        deadline = time.monotonic() + 10  # stock's threads end by themselves
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= threads
        return len(os.listdir("/proc/self/fd")), memory()["mapped"]

    before = saves(20)
    resident = resident_bytes()
    assert saves(200) == before
    assert resident_bytes() - resident < 8 * MIB
    stager.close()


def test_a_save_that_is_over_has_no_memory(tmp_path: Path) -> None:
    source = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    planner = dcp.DefaultSavePlanner()
    errors = []
    for step in range(4):
        kind = FailingWriter if step % 2 else HuggingFaceStorageWriter
        options: dict[str, Any] = {"storage_writer": kind(tmp_path / str(step))}
        if step > 1:
            options |= {"planner": planner, "async_stager": PinnedMemoryStager(StagingOptions())}
        answer: Any = torch_ckpt.async_save(source, **options)
        save = answer if isinstance(answer, Future) else answer.upload_completion
        if step % 2:
            with pytest.raises(OSError, match="broken disk") as raised:
                save.result()
            errors.append(raised.value)  # with its traceback and all that hangs on its frames
        else:
            save.result()
        assert memory()["leased"] == 0
    assert memory()["mapped"] == 4 * MIB
    assert len(errors) == 2


def test_a_writer_with_its_stager_can_be_pickled(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c")
    writer.stage({"w": torch.ones(3)})
    again = pickle.loads(pickle.dumps(writer))
    assert again.stage({"w": torch.ones(3)})["w"].sum() == 3
    stager = PinnedMemoryStager(StagingOptions())
    stager.stage({"w": torch.ones(3)})
    assert pickle.loads(pickle.dumps(stager)).config == stager.config
    stager.close()
