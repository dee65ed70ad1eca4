"""Reading runs no code, whatever the objects files say; and no leaf takes a name of ours."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from sample_states import FAILED

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.dcp.write import directory_save
from torch_ckpt.planning.reserved import RAW_LEAVES, RESERVED

ran: list[str] = []


def run(code: str) -> None:
    ran.append(code)


class Evil:
    def __reduce__(self) -> Any:
        return run, ("code of the checkpoint",)


def pickled(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def forge(path: Path, monkeypatch: pytest.MonkeyPatch, raw: Any, step: Any) -> None:
    """A checkpoint whose objects file says that a planner has packed the leaves `raw`."""
    with monkeypatch.context() as patch:
        patch.setattr(directory_save, "RESERVED", frozenset())
        patch.setattr("torch_ckpt.planning.flatten.RESERVED", frozenset())
        patch.setattr(
            "torch_ckpt.dcp.write.commit.planned_entries",
            lambda metadata: {"planned": [], "split": "", "paths": {}},
        )
        state = {RAW_LEAVES: raw, "step": step, "w": torch.ones(1)}
        torch_ckpt.save(state, checkpoint_id=path)


PLANNERS = [dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner]


@pytest.mark.parametrize("make", PLANNERS)
def test_bytes_said_to_be_packed_are_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    forge(tmp_path / "c", monkeypatch, ["step"], pickled(Evil()))
    target = {"w": torch.zeros(1), "step": 0}
    with pytest.raises(FAILED, match=r"'step': the pickle names .*without running code"):
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=make())
    assert not ran and target["step"] == 0
    reader = HuggingFaceStorageReader(tmp_path / "c", allow_pickle=True)
    torch_ckpt.load(target, storage_reader=reader, planner=make())
    assert ran == ["code of the checkpoint"]
    ran.clear()


@pytest.mark.parametrize(("raw", "step"), [(5, b""), ([1], b""), ("step", b""), (["step"], 5)])
def test_a_list_of_packed_leaves_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: Any, step: Any
) -> None:
    forge(tmp_path / "c", monkeypatch, raw, step)
    with pytest.raises(torch_ckpt.CorruptError, match="no list of names|is no bytes"):
        torch_ckpt.load({"step": 0}, checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("make", [dcp.DefaultSavePlanner, torch_ckpt.SavePlanner])
@pytest.mark.parametrize("name", sorted(RESERVED))
@pytest.mark.parametrize("value", [5, torch.ones(2)], ids=["object", "tensor"])
def test_names_of_ours_are_refused(tmp_path: Path, make: Any, name: str, value: Any) -> None:
    first, second = name.split(".")
    for state in ({name: value, "x": 1}, {first: {second: value}, "x": 1}):
        with pytest.raises(FAILED, match=f"{name}.*reserved"):
            torch_ckpt.save(state, checkpoint_id=tmp_path / "c", planner=make())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_foreign_tensors_may_have_names_of_ours(tmp_path: Path, name: str) -> None:
    save_file({name: torch.arange(3.0)}, tmp_path / "model.safetensors")
    for make in PLANNERS:
        target = {name: torch.zeros(3)}
        torch_ckpt.load(target, checkpoint_id=tmp_path, planner=make())
        assert torch.equal(target[name], torch.arange(3.0))
    whole: dict[str, Any] = {}
    torch_ckpt.load(whole, checkpoint_id=tmp_path, planner=torch_ckpt.LoadPlanner(rebuild=True))
    assert torch.equal(whole[name], torch.arange(3.0))


def test_a_tensor_of_the_structure_s_name_is_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_save, "RESERVED", frozenset())
    state = {"torch_ckpt.structure": torch.arange(3.0)}
    save_writer = HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True)
    dcp.save(state, storage_writer=save_writer)
    target = {"torch_ckpt.structure": torch.zeros(3)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(tmp_path / "c"))
    assert torch.equal(target["torch_ckpt.structure"], state["torch_ckpt.structure"])
