"""torch_ckpt.async_save: saves one after the other, what each one tells, errors nobody can miss."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from sample_states import load_ours
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter, PinnedMemoryStager, _core
from torch_ckpt.dcp import api, async_saves
from torch_ckpt.dcp.one_save import OneSaveStager
from torch_ckpt.dcp.staged_state import StagedState

BLOCKING = StagingOptions(False, False, False, False)
MIB = 1 << 20
# As a library: pytest has filters of its own.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def memory() -> dict[str, int]:
    stats: dict[str, int] = _core.call({"op": "arena", "staging": True})
    return stats


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # errors of other tests, with states in their tracebacks
    before = memory()["leased"]
    yield
    async_saves.close(20)
    assert memory()["leased"] == before
    _core.call({"op": "arena", "staging": True, "budget": 1 << 62})


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed until the test opens it; GatedWriters wait for it before they write."""
    GatedWriter.gate = threading.Event()
    GatedWriter.writing = []
    yield GatedWriter.gate
    GatedWriter.gate.set()


class GatedWriter(HuggingFaceStorageWriter):
    gate: threading.Event
    writing: list[str]

    def write_data(self, plan: Any, planner: Any) -> Any:
        GatedWriter.writing.append(self.path.name)
        assert GatedWriter.gate.wait(20)
        return super().write_data(plan, planner)


class FailingWriter(HuggingFaceStorageWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError(5, "broken disk", "the file")


def weights(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value)), "step": int(value)}


def begin(path: Path, value: float = 1.0, **options: Any) -> torch_ckpt.AsyncSave:
    """A save of weights that are other ones right after it."""
    state = weights(value)
    save = async_save(state, storage_writer=GatedWriter(path), **options)
    state["w"].fill_(-1)
    state["step"] = -1
    return save


def loads(path: Path, value: float = 1.0) -> bool:
    target = load_ours(path, weights())
    return bool((target["w"] == value).all()) and target["step"] == value


def async_save(state: dict[str, Any], **options: Any) -> torch_ckpt.AsyncSave:
    """The save, whichever of stock's two types the answer has."""
    save = torch_ckpt.async_save(state, **options).upload_completion
    assert isinstance(save, torch_ckpt.AsyncSave)
    return save


def test_it_returns_what_stock_would(tmp_path: Path) -> None:
    """Callers go by the type: an AsyncSaveResponse says that tensors must not change yet."""
    for config in (BLOCKING, StagingOptions()):
        for stager in (PinnedMemoryStager(config), None):
            answer: Any = torch_ckpt.async_save(
                weights(), checkpoint_id=tmp_path, async_stager=stager
            )
            beside = stager is not None and config.use_async_staging
            assert isinstance(answer, AsyncSaveResponse) == beside
            assert isinstance(answer, concurrent.futures.Future) != beside
            answer.staging_completion.result(20)
            save = answer.upload_completion
            assert isinstance(save, torch_ckpt.AsyncSave)
            assert isinstance(save.result(20), dcp.Metadata)
            assert concurrent.futures.wait({save}, 0).done == {save}
            assert save.error is None
            assert not save.cancel()


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    first = begin(tmp_path / "1", 1)
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    second = begin(tmp_path / "2", 2)
    assert first.done()
    second.result(20)
    assert second.stats.waited_s is not None and second.stats.waited_s > 0.1
    assert loads(tmp_path / "1", 1) and loads(tmp_path / "2", 2)


def test_a_wait_has_an_end(tmp_path: Path, gate: threading.Event) -> None:
    first = begin(tmp_path / "1", 1)
    with pytest.raises(torch_ckpt.ConflictError, match=r"into .*/1, and did not end within 0\.05"):
        begin(tmp_path / "2", 2, timeout=0.05)
    gate.set()
    first.result(20)
    assert loads(tmp_path / "1", 1)
    assert not (tmp_path / "2").exists()


def test_a_second_save_is_refused(tmp_path: Path, gate: threading.Event) -> None:
    first = begin(tmp_path / "1", 1)
    with pytest.raises(torch_ckpt.ConflictError, match="another save is going on, into .*/1"):
        begin(tmp_path / "2", 2, on_busy="raise")
    gate.set()
    first.result(20)
    begin(tmp_path / "2", 2, on_busy="raise").result(20)
    assert loads(tmp_path / "2", 2)


def test_saves_that_overlap_are_staged_at_once_and_written_in_turn(
    tmp_path: Path, gate: threading.Event
) -> None:
    stagers = [None, PinnedMemoryStager(BLOCKING), PinnedMemoryStager()]
    saves = []
    for number in range(6):
        state = weights(number)
        writer = GatedWriter(tmp_path / str(number))
        stager = stagers[number % 3]
        save = async_save(state, storage_writer=writer, async_stager=stager, on_busy="overlap")
        save.staging_completion.result(20)
        state["w"].fill_(-1)
        state["step"] = -1
        saves.append(save)
    assert memory()["leased"] == 6 * 2 * MIB
    assert not any(save.done() for save in saves)
    while not GatedWriter.writing:
        time.sleep(0.01)
    time.sleep(0.1)
    assert GatedWriter.writing == ["0"]
    gate.set()
    for number, save in enumerate(saves):
        save.result(20)
        assert loads(tmp_path / str(number), number)
    assert GatedWriter.writing == [str(number) for number in range(6)]


@pytest.mark.parametrize("shared", ["storage_writer", "planner", "async_stager"])
def test_saves_that_share_what_only_one_can_use_do_not_overlap(
    tmp_path: Path, gate: threading.Event, shared: str
) -> None:
    made: dict[str, Any] = {
        "storage_writer": GatedWriter(tmp_path / "0"),
        "planner": dcp.DefaultSavePlanner(),
        "async_stager": dcp.staging.DefaultStager(BLOCKING),
    }

    def save(number: int) -> torch_ckpt.AsyncSave:
        options = {"storage_writer": GatedWriter(tmp_path / str(number)), shared: made[shared]}
        state = weights(number)
        if shared == "storage_writer":
            options["checkpoint_id"] = tmp_path / str(number)
        began = async_save(state, on_busy="overlap", **options)
        state["w"].fill_(-1)
        return began

    first = save(0)
    threading.Timer(0.3, gate.set).start()
    second = save(1)
    assert first.done()
    second.result(20)
    assert loads(tmp_path / "0", 0) and loads(tmp_path / "1", 1)


def test_an_error_nobody_asked_for_is_raised_by_the_next_save(tmp_path: Path) -> None:
    async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"))
    with pytest.raises(torch_ckpt.CheckpointError, match=r"save, into .*/1, failed: .*broken disk"):
        async_save(weights(2), checkpoint_id=tmp_path / "2")
    assert not (tmp_path / "2").exists()
    async_save(weights(2), checkpoint_id=tmp_path / "2").result(20)
    assert loads(tmp_path / "2", 2)


def test_an_error_nobody_asked_for_is_raised_by_close(tmp_path: Path) -> None:
    stager = PinnedMemoryStager()
    async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"), async_stager=stager)
    with pytest.raises(
        torch_ckpt.CheckpointError, match=r"into .*/1, failed: .*broken disk"
    ) as told:
        stager.close()
    assert isinstance(told.value.__cause__, OSError)
    stager.close()


def test_close_waits_for_the_save(tmp_path: Path, gate: threading.Event) -> None:
    stager = PinnedMemoryStager(timeout=0.05)
    save = begin(tmp_path / "1", 1, async_stager=stager)
    with pytest.raises(torch_ckpt.ConflictError, match="into .*/1"):
        stager.close()
    threading.Timer(0.1, gate.set).start()
    stager.timeout = 20
    stager.close()
    assert save.done()


def test_errors_of_several_saves_are_all_named(tmp_path: Path, gate: threading.Event) -> None:
    for number in range(3):
        # Each waits for the one before, which is still at the gate.
        kind = FailingWriter if number else GatedWriter
        async_save(weights(), storage_writer=kind(tmp_path / str(number)), on_busy="overlap")
    gate.set()
    with pytest.raises(torch_ckpt.CheckpointError, match=r"/1, failed: .*; .*/2, failed: ") as told:
        async_saves.close(20)
    assert isinstance(told.value.__cause__, OSError)
    async_saves.close(20)


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_an_error_that_was_heard_is_not_raised_again(tmp_path: Path, ask: str) -> None:
    save = async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"))
    if ask == "result":
        with pytest.raises(OSError, match="broken disk"):
            save.result(20)
    else:
        assert isinstance(save.exception(20), OSError)
    assert isinstance(save.error, OSError)
    assert save.stats.error is not None and "broken disk" in save.stats.error
    async_save(weights(2), checkpoint_id=tmp_path / "2").result(20)


def test_a_state_that_cannot_be_staged_is_an_error_of_the_call(tmp_path: Path) -> None:
    bad = {"deep": {"w": torch.zeros(3, device="meta")}}
    planner = torch_ckpt.SavePlanner()
    for stager in (None, PinnedMemoryStager(BLOCKING)):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="'deep.w'.*meta"):
            async_save(bad, checkpoint_id=tmp_path / "1", planner=planner, async_stager=stager)
        # The planner that took part in the failure is as it was.
        async_save(
            weights(), checkpoint_id=tmp_path / "2", planner=planner, async_stager=stager
        ).result(20)
        assert loads(tmp_path / "2")
    assert not (tmp_path / "1").exists()


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


def test_failures_may_be_warnings(tmp_path: Path, gate: threading.Event) -> None:
    def warned(text: str, state: dict[str, Any], **options: Any) -> torch_ckpt.AsyncSave:
        with pytest.warns(RuntimeWarning, match=text):
            save = async_save(state, on_failure="warn", **options)
            assert save.result(20) is None
        assert save.exception() is None
        assert save.error is not None
        return save

    meta = {"w": torch.zeros(3, device="meta")}
    warned("meta", meta, checkpoint_id=tmp_path / "1")
    warned("meta", meta, checkpoint_id=tmp_path / "1", async_stager=PinnedMemoryStager())
    warned("broken disk", weights(), storage_writer=FailingWriter(tmp_path / "1"))
    warned("needs a checkpoint_id", weights())
    running = begin(tmp_path / "0")
    warned("another save", weights(), checkpoint_id=tmp_path / "1", on_busy="raise")
    gate.set()
    running.result(20)
    async_save(weights(), checkpoint_id=tmp_path / "1", on_failure="warn").result(20)
    assert loads(tmp_path / "1")


def test_what_fails_at_the_end_of_a_save_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(state: Any) -> None:
        raise OSError("no end")

    stager = PinnedMemoryStager(BLOCKING)
    with monkeypatch.context() as patch:
        patch.setattr(StagedState, "end", fails)
        save = async_save(weights(), checkpoint_id=tmp_path / "1", async_stager=stager)
        with pytest.raises(OSError, match="no end"):
            save.result(20)
    cause = save.error
    assert cause is not None
    cause.__traceback__ = None  # which has the state that did not end
    del save, cause
    gc.collect()


def test_an_unheard_error_is_a_warning_where_that_was_asked_for(tmp_path: Path) -> None:
    async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"))
    async_saves.wait_for(async_saves.running(), 20)
    with pytest.warns(RuntimeWarning, match="/1, failed: .*broken disk"):
        save = async_save(weights(), checkpoint_id=tmp_path / "2", on_failure="warn")
    save.result(20)
    assert loads(tmp_path / "2")


def test_what_is_to_be_done_when_it_is_committed(tmp_path: Path) -> None:
    seen = []

    def on_commit() -> None:
        seen.append((loads(tmp_path / "1"), save.done()))

    save = async_save(weights(), storage_writer=GatedWriter(tmp_path / "1"), on_commit=on_commit)
    save.result(20)
    assert seen == [(True, False)]

    def fails() -> None:
        raise ValueError("no upload")

    save = async_save(weights(2), checkpoint_id=tmp_path / "2", on_commit=fails)
    with pytest.raises(ValueError, match="no upload"):
        save.result(20)
    assert loads(tmp_path / "2", 2)
    save = async_save(weights(), storage_writer=FailingWriter(tmp_path / "3"), on_commit=on_commit)
    assert isinstance(save.exception(20), OSError)
    assert len(seen) == 1


def test_every_save_leaves_a_line_of_what_it_took(tmp_path: Path) -> None:
    log = tmp_path / "saves.jsonl"
    began = time.time()
    good = async_save(weights(), checkpoint_id=tmp_path / "1", log_path=log)
    good.result(20)
    bad = async_save(weights(), storage_writer=FailingWriter(tmp_path / "2"), log_path=log)
    assert isinstance(bad.exception(20), OSError)
    stock = async_save(weights(), storage_writer=dcp.FileSystemWriter(tmp_path / "3"), log_path=log)
    stock.result(20)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["path"] for line in lines] == [str(tmp_path / name) for name in "123"]
    for line, save in zip(lines, (good, bad, stock), strict=True):
        assert (line["rank"], line["world_size"]) == (0, 1)
        assert began <= line["started"] <= time.time()
        assert line["waited_s"] <= line["blocked_s"]
        assert line["total_s"] == save.stats.total_s
        assert line["error"] == save.stats.error
    first, failed, foreign = lines
    files = sum(file.bytes for file in torch_ckpt.Checkpoint(tmp_path / "1").describe().files)
    assert 4000 <= first["written_bytes"] <= files
    assert first["staged_bytes"] == 4000
    phases = [first[name] for name in ("staged_s", "planned_s", "written_s", "committed_s")]
    assert all(phase > 0 for phase in phases)
    assert sum(phases) <= first["total_s"]
    assert "broken disk" in failed["error"] and failed["written_s"] is None
    assert failed["staged_bytes"] == 4000
    assert foreign["error"] is None and foreign["written_s"] is None


def test_a_log_that_cannot_be_written_fails_no_save(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no line in the log"):
        save = async_save(weights(), checkpoint_id=tmp_path / "1", log_path=tmp_path / "no" / "log")
        save.result(20)
    assert loads(tmp_path / "1")


@pytest.mark.filterwarnings("error")
def test_no_save_hangs_where_warnings_are_errors(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)  # of callbacks that raise
    try:
        log = tmp_path / "no" / "log"
        async_save(weights(), checkpoint_id=tmp_path / "1", log_path=log).result(20)
        writer = FailingWriter(tmp_path / "2")
        save = async_save(weights(), storage_writer=writer, on_failure="warn")
        assert save.result(20) is None and save.error is not None
        async_saves.close(20)
    finally:
        logging.disable(logging.NOTSET)


def big(value: int) -> dict[str, Any]:
    return {"w": torch.full((8 * MIB,), value, dtype=torch.uint8), "step": value}


def test_a_state_that_does_not_fit_is_written_from_where_it_is(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager(BLOCKING, memory_budget="4MiB", over_budget="stream")
    state = big(7)
    opened = threading.Timer(0.3, gate.set)
    opened.start()
    began = time.perf_counter()
    save = async_save(state, storage_writer=GatedWriter(tmp_path / "c"), async_stager=stager)
    state["w"].fill_(1)  # it has been written when the call returns
    state["step"] = 1
    assert time.perf_counter() - began > 0.25
    save.result(20)
    assert load_ours(tmp_path / "c", big(0))["step"] == 7
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert (load_file(file)["w"] == 7).all()
    assert save.stats.staged_bytes is None
    assert memory()["mapped"] <= 4 * MIB


def test_a_state_that_does_not_fit_beside_the_trainer(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager(memory_budget="4MiB", over_budget="stream")
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


@pytest.mark.parametrize(
    "options", [{"on_busy": "queue"}, {"on_failure": "ignore"}, {"on_busy": None}]
)
def test_options_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=next(iter(options))):
        async_save(weights(), checkpoint_id=tmp_path, **options)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="over_budget"):
        PinnedMemoryStager(over_budget="later")  # type: ignore[arg-type]


def test_a_forked_child_does_not_wait_for_its_parents_saves(
    tmp_path: Path, gate: threading.Event
) -> None:
    stager = PinnedMemoryStager()
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
            said += f" {async_saves.running()}"
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
    "function", [api.async_save.__wrapped__, OneSaveStager.after_execute, OneSaveStager._arrived]
)
def test_ctrl_c_at_any_line(tmp_path: Path, function: Any) -> None:
    """It is raised, or comes too late; and the save ends, and so does the next one."""
    stager = PinnedMemoryStager(BLOCKING)
    planner = dcp.DefaultSavePlanner()
    interrupts = 0
    # What comes before the save is registered can lose nothing.
    for number in range(16 if function is api.async_save.__wrapped__ else 1, 100):
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
        async_saves.wait_for(async_saves.running(), 20)
        for save in async_saves._known():
            save.told()
        interrupts += interrupted
        assert "set_up_planner" not in planner.__dict__
        gc.collect()
        async_save(weights(2), checkpoint_id=tmp_path / "d", planner=planner).result(20)
        if not interrupted:
            break
    assert interrupts >= 3 and loads(tmp_path / "c") and loads(tmp_path / "d", 2)


def test_a_call_of_stock_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    planner = dcp.DefaultSavePlanner()
    errors = []
    for state in (weights(), {"w": torch.zeros(3, device="meta")}):
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "submit", fails)
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
    async_saves.wait_for(async_saves.running(), 20)
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
    assert async_saves._saves == []


class Passing(dcp.staging.BlockingAsyncStager):
    """Passes on what it gets."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(state_dict)
