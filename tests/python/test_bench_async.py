"""The benchmarks of background saves at tiny sizes: every contender runs, wrong bytes are found,
figures mean what they say.

No test looks at how long anything took.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import test_benchmarks
from test_benchmarks import failures, run
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from benchmarks import bench_async, processes
from benchmarks.async_trainer import SHAPES, time_save
from benchmarks.contender import ROWS, Contender, Context, Figure, Row
from benchmarks.program import LimitsProgram, MemoryWatcher, Timing
from benchmarks.report import figure_cells, markdown, ratio_cells
from benchmarks.summary import summarise
from benchmarks.trainer import Pace, Trainer

context, program = test_benchmarks.context, test_benchmarks.program
ROW_NAMES = [f"async_{name}" for name in SHAPES]
FIRST = "async_first"


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(3))
def test_every_contender_runs_and_leaves_nothing(
    number: int, context: Context, monkeypatch: Any
) -> None:
    # Each starts a process that imports torch, so every contender runs in one of the rows only.
    name, build = ROW_NAMES[number], ROWS[ROW_NAMES[number]]

    def some(context: Context) -> Row:
        row = build(context)
        kept = [c for i, c in enumerate(row.contenders) if i % 3 == number or c.role == "limit"]
        return dataclasses.replace(row, contenders=kept)

    monkeypatch.setitem(ROWS, name, some)
    records = run(name, context)
    assert failures(records) == []
    measured = [record for record in records if record["kind"] == "measured"]
    assert any(record["role"] == "ours" for record in measured)
    for record in measured:
        if record["role"] != "limit":
            assert record["figures"].keys() == {figure.key for figure in bench_async.FIGURES}
            assert 0 < record["figures"]["call"] <= record["figures"]["blocking"]
            assert record["figures"]["blocking"] <= record["figures"]["durable"]
            assert record["figures"]["memory"] > 0
    assert list(context.directory.iterdir()) == []
    assert "| blocking ms |" in markdown("fakes", {}, 1, "", summarise(records))


@pytest.mark.campaign
def test_the_first_save_alone(context: Context) -> None:
    row = ROWS[FIRST](context)
    assert {contender.name for contender in row.contenders} == {
        *bench_async.FIRST,
        bench_async.LIMIT,
    }
    (found,) = [contender for contender in row.contenders if contender.name == "ours, async_save"]
    found.before()
    timing = found.run()
    found.check()
    found.after()
    assert timing is not None and 0 < timing.figures["first_blocking"]


def contender_of(row: Row, name: str) -> Contender:
    return next(contender for contender in row.contenders if contender.name == name)


@pytest.mark.campaign
def test_wrong_bytes_fail_the_check(context: Context) -> None:
    found = contender_of(ROWS["async_lora"](context), "ours, async_save")
    if found.skip:
        pytest.skip(found.skip)
    found.before()
    found.run()
    found.check()
    (saved,) = (context.directory / "training").rglob("*.safetensors")
    with open(saved, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(ValueError, match="other bytes"):
        found.check()
    found.after()


@pytest.mark.campaign
def test_a_trainer_that_fails_says_why(context: Context) -> None:
    found = contender_of(ROWS["async_lora"](context), "DCP FS THREAD")
    (context.directory / "training").write_text("")  # a file where the directory should be
    with pytest.raises(bench_async.TrainerError, match="training"):
        found.run()


class ScriptedTrainer(Trainer):
    """Steps whose seconds are given; each may do something first."""

    def __init__(self, steps: list[tuple[float, Any]]) -> None:
        self._steps = iter(steps)

    def step(self) -> float:
        seconds, first = next(self._steps)
        first()
        return seconds


def test_figures_of_a_save(tmp_path: Path) -> None:
    upload: Future[Any] = Future()
    synced = threading.Event()
    order: list[str] = []

    def finish() -> None:
        order.append("upload")
        upload.set_result(None)
        assert synced.wait(60)

    def sync(path: Path) -> None:
        order.append(f"sync {path.name}")
        synced.set()

    # The trainer may look again before the end is known, so there are steps to spare.
    spare = [(0.01, lambda: None)] * 100_000
    trainer = ScriptedTrainer([(0.02, lambda: None), (0.05, finish), *spare])
    cpu = iter([10.0, 12.0])
    pace = Pace(seconds=0.01, cpu_seconds=0.0)
    found = time_save(
        lambda state, path: upload, {}, tmp_path / "c", trainer, pace, sync, lambda: next(cpu)
    )
    assert order == ["upload", "sync c"]
    assert found.lost == pytest.approx(0.05) and found.worst_step == pytest.approx(5)
    assert found.cpu == 2.0
    assert 0 < found.call <= found.blocking <= found.durable


def test_training_waits_for_staging(tmp_path: Path) -> None:
    staging: Future[None] = Future()
    upload: Future[None] = Future()

    def step() -> None:
        assert staging.done()
        if not upload.done():
            upload.set_result(None)

    def save(state: Any, path: Path) -> AsyncSaveResponse:
        threading.Timer(0.05, lambda: staging.set_result(None)).start()
        return AsyncSaveResponse(staging_completion=staging, upload_completion=upload)

    trainer = ScriptedTrainer([(0.01, step)] * 100_000)
    pace = Pace(0.01, 0.01)
    found = time_save(save, {}, tmp_path, trainer, pace, lambda path: None, lambda: 0.0)
    assert found.call < found.blocking
    assert found.cpu < 0  # the steps' own is taken off


def test_a_save_that_fails_is_heard(tmp_path: Path) -> None:
    upload: Future[None] = Future()
    upload.set_exception(OSError("disk full"))
    trainer = ScriptedTrainer([(0.01, lambda: None)] * 100_000)
    with pytest.raises(OSError, match="disk full"):
        time_save(lambda *_: upload, {}, tmp_path, trainer, Pace(1, 1), lambda _: None, lambda: 0.0)


# Of memory that it shares with a child counts one copy only.
BURN = """
import os, signal, sys, time
while time.process_time() < 0.3: pass
held = bytearray(64 << 20); held[::4096] = b"x" * (len(held) // 4096)
child = os.fork()
if child == 0: signal.pause()
print("done", flush=True); sys.stdin.read()
os.kill(child, signal.SIGKILL)
"""


def shared_memory() -> int:
    """Of the machine, which counts as every tree's: bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def undisturbed(measure: Callable[[], int]) -> int:
    """What `measure` says, measured anew where other tests have changed shared memory meanwhile."""
    for _ in range(10):
        before = shared_memory()
        grown = measure()
        if abs(shared_memory() - before) < 1 << 20:
            break
    return grown


def test_children_count_and_what_they_share_counts_once(program: LimitsProgram) -> None:
    def measure() -> int:
        with MemoryWatcher(program, tree=True) as watcher:
            before = processes.cpu_seconds(without=watcher.pid)
            memory = watcher.begin()
            child = subprocess.Popen(
                [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == b"done\n"
            time.sleep(0.05)  # the watcher looks every 5 ms
            grown = watcher.end() - memory
            running = processes.cpu_seconds(without=watcher.pid) - before
            assert running >= 0.3
            assert processes.cpu_seconds(without=child.pid) - before < running
            child.communicate()
            assert processes.cpu_seconds(without=watcher.pid) - before >= running  # ended, not lost
        return grown

    assert 60 << 20 < undisturbed(measure) < 120 << 20


def figure_row(context: Context, monkeypatch: Any) -> list[dict[str, Any]]:
    """Two rounds of a rival, ours and a limit whose figures are known."""

    def made(name: str, role: Any, blocking: list[float], **more: float) -> Contender:
        values = iter(blocking)
        return Contender(
            name=name,
            role=role,
            run=lambda: Timing(1.0, 1.0, 10, 7, {"blocking": next(values), **more}),
        )

    row = Row(
        title="fake",
        bytes=10,
        tensors=1,
        contenders=[
            made("slow", "rival", [8.0, 4.0], lost=3.0),
            made("mine", "ours", [2.0, 2.0], lost=1.0),
            made("machine", "limit", [1.0, 0.5]),
        ],
        limit="machine",
        figures=(
            Figure("blocking", "blocking ms", worst=True, compared=True),
            Figure("lost", "lost ms"),
        ),
    )
    monkeypatch.setitem(ROWS, "fake", lambda _: row)
    return run("fake", context, rounds=2)


def test_report_of_figures(context: Context, monkeypatch: Any) -> None:
    records = figure_row(context, monkeypatch)
    json.dumps(records)
    (row,) = summarise(records)
    cells = figure_cells(row)
    assert cells.head == ["contender", "blocking ms", "of limit", "lost ms"]
    assert cells.lines == [
        ["slow", "6.00 (8.00)", "12% (12%)", "3.00"],
        ["mine", "2.00 (2.00)", "38% (25%)", "1.00"],
        ["limit: machine", "0.75 (1.00)", "-", "-"],
    ]
    ratios = ratio_cells(row, "blocking")
    assert ratios.head == ["blocking: times less than, median (worst)", "mine"]
    assert ratios.lines == [["slow", "3.00x (2.00x)"]]
    text = markdown("fakes", {}, 2, "", [row])
    assert "| slow | 6.00 (8.00) |" in text and "GB/s" not in text
