"""Owners of native work: what Ctrl-C, lost answers and forks leave behind."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import PACKAGE

import torch_ckpt
from torch_ckpt.errors import error_from, with_rank
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.sessions import SaveSession, _Session

STATE = {"w": torch.arange(6.0)}


def check(path: Path) -> None:
    target = {"w": torch.zeros(6)}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], STATE["w"])


def patch_call(monkeypatch: pytest.MonkeyPatch, op: str, after: Any) -> None:
    """After the core has answered requests `op`, `after` is called."""
    call = core.call

    def patched(request: dict[str, Any]) -> Any:
        answer = call(request)
        if request["op"] == op:
            after()
        return answer

    monkeypatch.setattr(core, "call", patched)


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """A shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    _thread.interrupt_main()
    time.sleep(0.2)  # in which the main thread hears of it


def test_ctrl_c_in_the_begin_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch_call(patch, "begin_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            SaveSession(str(tmp_path / "c"), overwrite=True)
    assert list(tmp_path.iterdir()) == []
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
    check(tmp_path / "c")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_answer_of_the_commit_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The error is itself, and what was committed is there."""

    def lose() -> None:
        raise kind

    with monkeypatch.context() as patch:
        patch_call(patch, "commit_save", lose)
        session = SaveSession(str(tmp_path / "c"), overwrite=True)
        request = {"world_size": 1, "files": [], "objects": [], "planned": [], "split": ""}
        with pytest.raises(kind):
            session.commit(request)
        session.end()
    assert (tmp_path / "c" / "torch_ckpt.json").exists()
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
    check(tmp_path / "c")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_what_a_signal_handler_raises_waits_for_the_work(kind: type[BaseException]) -> None:
    """Ctrl-C however often; and torch's DataLoader has a handler that raises RuntimeError."""
    seen = []

    def handler(*_: Any) -> None:
        raise kind

    signal.signal(signal.SIGINT, handler)

    def work() -> None:
        for _ in range(3):
            interrupt()
        time.sleep(0.1)
        seen.append("ended")

    with Job() as job:
        with pytest.raises(kind):
            job.run(work)
        assert seen == ["ended"]
        assert job.run(lambda: 5) == 5


def test_sessions_are_forgotten(tmp_path: Path) -> None:
    before = set(_Session._open)
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
    session = SaveSession(str(tmp_path / "d"), overwrite=True)
    assert set(_Session._open) - before == {("save", str(tmp_path / "d"))}
    session.end()
    session.end()
    assert set(_Session._open) == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_a_session_begins(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
    with _Session._mutex:
        child = os.fork()
        if child == 0:
            try:
                SaveSession(str(tmp_path / "d"), overwrite=True)
            except torch_ckpt.UnsupportedError:
                os._exit(0)
            except BaseException:
                os._exit(1)
            os._exit(2)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child waits for its parent's lock"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_a_rank_is_named_once() -> None:
    fields = {"kind": "io", "message": "pwrite failed", "errno": 28, "file": "/f", "tensor": None}
    error = with_rank(with_rank(error_from(fields), 1), 1)
    assert str(error).count("rank 1") == 1


def test_at_the_end_of_the_interpreter_calls_are_made_in_place() -> None:
    """Where Python 3.12 starts no thread."""
    script = """
import atexit, threading
from torch_ckpt.native import jobs
from torch_ckpt.native.progress import told

@atexit.register
def last() -> None:
    assert jobs.Job().run(threading.current_thread) is threading.main_thread()
    with jobs.Job() as job, told(job, lambda done, total: print("told", done), threading.Event()):
        print(threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\ntold 0\n", "")
