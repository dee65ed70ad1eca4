"""What the tests of torch_ckpt.async_save share: writers that wait or fail, and what they write."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_states import load_ours
from torch.distributed.checkpoint.staging import StagingOptions

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter
from torch_ckpt.native import core

BLOCKING = StagingOptions(False, False, False, False)
MIB = 1 << 20
# Of the modules that test it. pytest drops the filter that torch_ckpt sets for what stock says in
# its thread.
MARKS = [
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def memory() -> dict[str, int]:
    stats: dict[str, int] = core.call({"op": "arena", "snapshots": True})
    return stats


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


class OddWriter(dcp.FileSystemWriter):
    """Keeps where it saves to elsewhere."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.path = self.place
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


def weights(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value)), "step": int(value)}


def async_save(state: dict[str, Any], **options: Any) -> torch_ckpt.AsyncSave:
    """The save, whichever of stock's two types the answer has."""
    save = torch_ckpt.async_save(state, **options).upload_completion
    assert isinstance(save, torch_ckpt.AsyncSave)
    return save


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
