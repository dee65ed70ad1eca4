"""async_save that fails or is interrupted anywhere: every future ends, and nothing is left behind."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from async_writers import (
    BLOCKING,
    MARKS,
    async_save,
    begin,
    loads,
    memory,
    weights,
)
from torch.distributed.checkpoint.staging import StagingOptions

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.calls import futures
from torch_ckpt.calls.async_save import async_save as whole_call
from torch_ckpt.calls.background import Background
from torch_ckpt.staging.staged_state import StagedState

pytestmark = MARKS


class UnpicklableError(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("not even this")


class Interrupted(PinnedMemoryStager):
    error: BaseException

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnpicklableError(threading.Lock())])
def test_what_a_stager_raises_is_raised(tmp_path: Path, error: BaseException) -> None:
    stager = Interrupted(BLOCKING)
    stager.error = error
    with pytest.raises(type(error)):
        async_save(weights(), checkpoint_id=tmp_path / "1", async_stager=stager)
    async_save(weights(), checkpoint_id=tmp_path / "1").result(20)
    assert loads(tmp_path / "1")


def test_a_state_that_cannot_be_staged_is_an_error_of_the_call(tmp_path: Path) -> None:
    bad = {"deep": {"w": torch.zeros(3, device="meta")}}
    planner = torch_ckpt.SavePlanner()
    for stager in (None, PinnedMemoryStager(BLOCKING)):
        with pytest.raises(torch_ckpt.UnsupportedError, match="'deep.w'.*meta"):
            async_save(bad, checkpoint_id=tmp_path / "1", planner=planner, async_stager=stager)
        # The planner that took part in the failure is as it was.
        async_save(
            weights(), checkpoint_id=tmp_path / "2", planner=planner, async_stager=stager
        ).result(20)
        assert loads(tmp_path / "2")
    assert not (tmp_path / "1").exists()


def test_what_fails_behind_the_commit_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a commit undoes none: memory that is not given back is a warning."""
    really_end = StagedState.end

    def fails(state: StagedState) -> None:
        really_end(state)
        raise OSError("no end")

    monkeypatch.setattr(StagedState, "end", fails)
    committed: list[int] = []
    with pytest.warns(RuntimeWarning, match="keeps its memory until its tensors are gone: no end"):
        async_save(
            weights(),
            checkpoint_id=tmp_path / "1",
            async_stager=PinnedMemoryStager(BLOCKING),
            on_commit=lambda: committed.append(1),
        ).result(20)
    assert committed == [1]
    assert loads(tmp_path / "1")


def test_a_forked_child_does_not_wait_for_its_parents_saves(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager(StagingOptions())
    staged: Any = stager.stage({})
    assert staged.result(20) == {}
    save = begin(tmp_path / "1")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            said = ""
            for call in (save.result, save.exception):
                try:
                    call()
                except torch_ckpt.InvalidArgumentError as error:
                    said += str(error)
            try:
                stager.stage(weights()).result(20)  # type: ignore[union-attr]
            except torch_ckpt.UnsupportedError as error:
                said += str(error)
            said += f" {futures.running()}"
        except BaseException as error:
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10000).decode()
    os.close(read)
    os.close(write)
    assert said.count("belongs to the parent") == 2 and "spawn" in said, said
    assert said.endswith(" []"), said
    gate.set()
    save.result(20)
    assert loads(tmp_path / "1")


def interrupt_lines(function: Any, number: int) -> Any:
    """A trace that raises KeyboardInterrupt at the `number`th line of `function`, and in nothing
    else, once."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize(
    "function", [inspect.unwrap(whole_call), Background.stage, Background._have, Background.let_go]
)
def test_ctrl_c_at_any_line(tmp_path: Path, function: Any) -> None:
    """It is raised, or comes too late; and the save ends, and so does the next one."""
    stager = PinnedMemoryStager(BLOCKING)
    planner = dcp.DefaultSavePlanner()
    interrupts = 0
    # What comes before the save is registered can lose nothing.
    for number in range(16 if function is inspect.unwrap(whole_call) else 1, 100):
        before = sys.gettrace()
        sys.settrace(interrupt_lines(function, number))
        try:
            torch_ckpt.async_save(
                weights(), checkpoint_id=tmp_path / "c", async_stager=stager, planner=planner
            )
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        futures.wait_for(futures.running(), 20)
        for save in futures.known():
            save.told()
        interrupts += interrupted
        gc.collect()
        async_save(weights(2), checkpoint_id=tmp_path / "d", planner=planner).result(20)
        if not interrupted:
            break
    assert interrupts >= 3 and loads(tmp_path / "c") and loads(tmp_path / "d", 2)


def test_a_thread_that_cannot_be_had_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "torch_ckpt-save":
            raise RuntimeError("can't start new thread")
        begins(thread)

    planner = dcp.DefaultSavePlanner()
    errors = []
    for state in (weights(), {"w": torch.zeros(3, device="meta")}):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="new thread") as raised:
                async_save(state, checkpoint_id=tmp_path / "1", planner=planner)
            errors.append(raised.value)  # and all that its frames hold
        assert memory()["leased"] == 0
    async_save(weights(), checkpoint_id=tmp_path / "1", planner=planner).result(20)
    assert loads(tmp_path / "1")


class BrokenLater(dcp.staging.BlockingAsyncStager):
    """A stager that copies when the save has begun, and cannot."""

    _synchronize_after_execute = True

    def synchronize_staging(self) -> None:
        raise RuntimeError("no copy")


def test_a_stager_that_fails_when_it_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no copy"):
        async_save(weights(), checkpoint_id=tmp_path / "1", async_stager=BrokenLater())
    futures.wait_for(futures.running(), 20)
    assert not (tmp_path / "1").exists()


class Kept:
    """What a weak reference can refer to."""


def test_futures_that_are_kept_keep_no_states(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)  # pytest keeps what DCP logs
    try:
        keeps_no_states(tmp_path)
    finally:
        logging.disable(logging.NOTSET)


def keeps_no_states(tmp_path: Path) -> None:
    kept = []
    mark = Kept()
    seen = weakref.ref(mark)
    for number in range(3):
        state = {**weights(), "mark": mark if number == 1 else 0}
        save = torch_ckpt.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(tmp_path / str(number)),
            on_busy="overlap",
            async_stager=Passing(),
        )
        kept.append(save.upload_completion)
    for upload in kept:
        upload.result(20)
    del state, mark, save
    gc.collect()
    assert seen() is None
    assert futures._saves == []


class Passing(dcp.staging.BlockingAsyncStager):
    """Passes on what it gets."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(state_dict)


class Counter:
    """A Stateful."""

    def __init__(self) -> None:
        self.value = 3

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "w": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def test_entries_that_have_a_state(tmp_path: Path) -> None:
    counter = Counter()
    save = async_save({**weights(), "counter": counter}, checkpoint_id=tmp_path / "c")
    counter.value = 4
    save.result(20)
    torch_ckpt.load({"counter": counter}, checkpoint_id=tmp_path / "c")
    assert counter.value == 3

    def broken() -> dict[str, Any]:
        raise RuntimeError("no state")

    counter.state_dict = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no state"):
        async_save({"counter": counter}, checkpoint_id=tmp_path / "d")
