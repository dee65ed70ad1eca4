"""torch_ckpt.async_save: saves one after the other, what each one tells, errors nobody can miss."""

from __future__ import annotations

import concurrent.futures
import json
import logging
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
    OddWriter,
    async_save,
    begin,
    loads,
    memory,
    weights,
)
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.calls import futures, turn
from torch_ckpt.native import operators

pytestmark = MARKS


def test_tensors_may_change_when_the_call_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stager that was made to prepare memory as well, and told nothing else."""
    copy = operators.stage

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return copy(*arguments, **options)

    monkeypatch.setattr(operators, "stage", slow)
    state = {f"w{i}": torch.zeros(1 << 20) for i in range(4)}
    stager = PinnedMemoryStager(prepare=state)
    save = torch_ckpt.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)
    assert save.staging_completion.done()
    for tensor in state.values():
        tensor.add_(1)
    save.result(20)
    target = {name: torch.ones(1 << 20) for name in state}
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert all(not tensor.any() for tensor in target.values())
    stager.close()


def test_it_returns_what_stock_would(tmp_path: Path) -> None:
    """Both of what stock returns: a future, and a response with two."""
    for config in (BLOCKING, StagingOptions()):
        for stager in (PinnedMemoryStager(config), None):
            answer: Any = torch_ckpt.async_save(
                weights(), checkpoint_id=tmp_path, async_stager=stager
            )
            assert isinstance(answer, AsyncSaveResponse)
            assert isinstance(answer, concurrent.futures.Future)
            assert len({answer, answer.staging_completion}) == 2
            beside = stager is not None and config.use_async_staging
            assert beside or answer.staging_completion.done()
            answer.staging_completion.result(20)
            save = answer.upload_completion
            assert isinstance(save, torch_ckpt.AsyncSave)
            assert isinstance(save.result(20), dcp.Metadata)
            assert concurrent.futures.wait({save}, 0).done == {save}
            assert save.error is None
            assert not save.cancel()


@pytest.mark.parametrize("kind", [torch_ckpt.AsyncSave, torch_ckpt.MergeFuture])
def test_a_future_has_what_users_need(kind: type) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert public - set(dir(concurrent.futures.Future)) <= {"upload_completion"}


def test_a_save_that_is_cancelled_leaves_nothing(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    begin(tmp_path / "c", 1).result(20)
    gate.clear()
    save = begin(tmp_path / "c", 2, on_busy="overlap")
    later = begin(tmp_path / "d", 3, on_busy="overlap")
    assert save.cancel() and later.cancel()
    gate.set()
    for each in (save, later):
        with pytest.raises(torch_ckpt.CancelledError):
            each.result(20)
        assert not each.cancelled() and not each.cancel()
    assert loads(tmp_path / "c", 1)
    assert not (tmp_path / "d").exists() or not any((tmp_path / "d").iterdir())
    begin(tmp_path / "c", 4).result(20)
    assert loads(tmp_path / "c", 4)


def test_a_second_save_waits_for_the_first(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(tmp_path / "1", 1)
    wait = futures.wait_for

    def waits(*arguments: Any) -> None:
        assert gate.is_set() or not first.done()
        gate.set()
        wait(*arguments)

    monkeypatch.setattr(futures, "wait_for", waits)
    second = begin(tmp_path / "2", 2)
    assert first.done()
    second.result(20)
    assert second.stats.waited_s is not None and second.stats.waited_s > 0
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


def test_of_two_threads_that_save_at_once_one_begins(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = turn._verdict

    def slowly(*arguments: Any) -> Any:
        verdict = decide(*arguments)
        time.sleep(0.2)
        return verdict

    monkeypatch.setattr(turn, "_verdict", slowly)

    def save(name: str) -> Any:
        return begin(tmp_path / name, on_busy="raise")

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(save, name) for name in "ab"]
        errors = [call.exception(20) for call in calls]
    assert sorted(type(error).__name__ for error in errors) == ["ConflictError", "NoneType"]
    gate.set()
    next(call for call in calls if call.exception() is None).result().result(20)


def test_saves_that_overlap_are_staged_at_once_and_written_in_turn(
    tmp_path: Path, gate: threading.Event
) -> None:
    stagers = [None, PinnedMemoryStager(BLOCKING), PinnedMemoryStager(StagingOptions())]
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
        "async_stager": dcp.staging.BlockingAsyncStager(),
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
    stager = PinnedMemoryStager(StagingOptions())
    async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"), async_stager=stager)
    with pytest.raises(
        torch_ckpt.CheckpointError, match=r"into .*/1, failed: .*broken disk"
    ) as told:
        stager.close()
    assert isinstance(told.value.__cause__, OSError)
    stager.close()


def test_close_waits_for_the_save(tmp_path: Path, gate: threading.Event) -> None:
    stager = PinnedMemoryStager(StagingOptions(), timeout=0.05)
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
        futures.close(20)
    assert isinstance(told.value.__cause__, OSError)
    futures.close(20)


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
    warned(
        "meta",
        meta,
        checkpoint_id=tmp_path / "1",
        async_stager=PinnedMemoryStager(StagingOptions()),
    )
    warned("broken disk", weights(), storage_writer=FailingWriter(tmp_path / "1"))
    warned("needs a path", weights())
    running = begin(tmp_path / "0")
    warned("another save", weights(), checkpoint_id=tmp_path / "1", on_busy="raise")
    gate.set()
    running.result(20)
    async_save(weights(), checkpoint_id=tmp_path / "1", on_failure="warn").result(20)
    assert loads(tmp_path / "1")


def test_an_unheard_error_is_a_warning_where_that_was_asked_for(tmp_path: Path) -> None:
    async_save(weights(), storage_writer=FailingWriter(tmp_path / "1"))
    futures.wait_for(futures.running(), 20)
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
    with pytest.warns(RuntimeWarning, match="no line in the log"):
        async_save(weights(), checkpoint_id=tmp_path / "2", log_path="a\0b").result(20)
    with pytest.warns(RuntimeWarning, match="no line in the log"):
        torch_ckpt.save(weights(), tmp_path / "3", log_path="a\0b")
    assert loads(tmp_path / "2") and loads(tmp_path / "3")


def test_a_writer_whose_path_is_no_path(tmp_path: Path) -> None:
    writer = OddWriter(tmp_path / "c")
    writer.place, writer.path = writer.path, 5
    assert torch_ckpt.save(weights(), storage_writer=writer).stats.path == "OddWriter"
    writer.path = 5
    save = async_save(weights(), storage_writer=writer)
    save.result(20)
    assert save.stats.path == "OddWriter"
    assert loads(tmp_path / "c")


def test_time_between_saves_counts_as_none(tmp_path: Path) -> None:
    writer = torch_ckpt.HuggingFaceStorageWriter(tmp_path / "1", save_distributed=True)
    writer.reset(tmp_path / "2")
    time.sleep(0.5)
    stats = torch_ckpt.SaveStats("", 0, 1, 0.0)
    began = time.time()
    stats.count(dcp.save(weights(), storage_writer=writer))
    assert stats.planned_at is not None and stats.planned_at >= began - 0.1


@pytest.mark.filterwarnings("error")
def test_no_save_hangs_where_warnings_are_errors(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)  # of callbacks that raise
    try:
        log = tmp_path / "no" / "log"
        async_save(weights(), checkpoint_id=tmp_path / "1", log_path=log).result(20)
        writer = FailingWriter(tmp_path / "2")
        save = async_save(weights(), storage_writer=writer, on_failure="warn")
        assert save.result(20) is None and save.error is not None
        futures.close(20)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "options", [{"on_busy": "queue"}, {"on_failure": "ignore"}, {"on_busy": None}]
)
def test_options_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=next(iter(options))):
        async_save(weights(), checkpoint_id=tmp_path, **options)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="over_budget"):
        PinnedMemoryStager(over_budget="later")  # type: ignore[arg-type]
