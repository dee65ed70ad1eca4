"""Errors with the collector off, as torchtitan has it: what a failed call has held goes with its
error. And errors of signal handlers, which are not the engine's."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt.native import jobs


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Weights(dict[str, Any]):
    """Can be referred to weakly."""


def goes(held: weakref.ref[Any]) -> bool:
    """When the thread that saved has ended, which is after the future."""
    until = time.monotonic() + 10
    while held() is not None and time.monotonic() < until:
        time.sleep(0.01)
    return held() is None


def of_no_dtype(path: Path, state: Weights) -> None:
    state["b"] = torch.eye(2).to_sparse()
    torch_ckpt.save(state, path)


def over_another(path: Path, state: Weights) -> None:
    torch_ckpt.save({"a": torch.ones(2)}, path)
    torch_ckpt.save(state, path, overwrite=False)


def without_a_place(path: Path, state: Weights) -> None:
    path.write_text("in the way")
    torch_ckpt.save(state, path)


def a_load_of_a_missing_name(path: Path, state: Weights) -> None:
    torch_ckpt.save({"a": torch.ones(2)}, path)
    state["c"] = torch.ones(2)
    torch_ckpt.load(state, path)


def a_load_of_damage(path: Path, state: Weights) -> None:
    torch_ckpt.save(state, path)
    (file,) = path.glob("shard-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    torch_ckpt.load(state, path)


def in_the_background(path: Path, state: Weights) -> None:
    state["b"] = torch.eye(2).to_sparse()
    torch_ckpt.async_save(state, path).result()


def written_in_the_background(path: Path, state: Weights) -> None:
    path.write_text("in the way")
    torch_ckpt.async_save(state, path).result(20)


@pytest.mark.parametrize(
    "call",
    [
        of_no_dtype,
        over_another,
        without_a_place,
        a_load_of_a_missing_name,
        a_load_of_damage,
        in_the_background,
        written_in_the_background,
    ],
)
def test_what_a_failed_call_held_goes_with_its_error(
    tmp_path: Path, no_collector: None, call: Callable[[Path, Weights], None]
) -> None:
    def fails() -> weakref.ref[Weights]:
        state = Weights(a=torch.ones(4))
        with pytest.raises((torch_ckpt.CheckpointError, OSError)):
            call(tmp_path / "c", state)
        return weakref.ref(state)

    assert goes(fails())


def test_a_future_that_is_kept_does_not_keep_the_state(tmp_path: Path, no_collector: None) -> None:
    (tmp_path / "c").write_text("in the way")
    state = Weights(a=torch.ones(4))
    tensor = weakref.ref(state["a"])
    future = torch_ckpt.async_save(state, tmp_path / "c")
    del state
    assert isinstance(future.exception(20), (torch_ckpt.CheckpointError, OSError))
    assert goes(tensor)


def killed(*_: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 1) is killed")


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, killed)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_what_a_signal_handler_raises_is_raised(
    tmp_path: Path, handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that an operator raises as well. The native job ends as cancelled."""
    begun = threading.Event()
    run = jobs.Job.run

    def interrupted(self: jobs.Job, work: Callable[[], Any]) -> Any:
        def waiting() -> Any:
            if not begun.is_set():
                begun.set()
                os.kill(os.getpid(), signal.SIGUSR1)
                while not jobs.core.call({"op": "job_poll", "job": self.id})["cancelled"]:
                    pass
            return work()

        return run(self, waiting)

    monkeypatch.setattr(jobs.Job, "run", interrupted)
    for call in (
        lambda: torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "c"),
        lambda: torch_ckpt.load({"w": torch.ones(2)}, tmp_path / "good"),
    ):
        begun.set()
        torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "good")
        begun.clear()
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            call()
        assert begun.is_set()
    assert sorted(os.listdir(tmp_path)) == ["good"]
