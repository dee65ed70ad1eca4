"""torch.set_default_device decides where the user's tensors are made, not ours."""

from __future__ import annotations

from pathlib import Path

import torch

import torch_ckpt
from torch_ckpt.objects import dumps_objects, loads_objects


def test_save_and_load(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "half": torch.ones(3), "o": (torch.arange(3), [1])}
    target = {"w": torch.zeros(6), "half": torch.zeros(3).half(), "o": None}
    with torch.device("meta"):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c")
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c")  # one in place, one by a cast
        torch_ckpt.consolidate_safetensors_files(tmp_path / "c", tmp_path / "out", None)
    assert torch.equal(target["w"], state["w"])
    assert torch.equal(target["half"], state["half"].half())
    assert torch.equal(target["o"][0], state["o"][0]) and target["o"][1] == [1]


def test_objects() -> None:
    text, side = dumps_objects({"t": (torch.arange(3.0), 1)}, file_id="0")
    with torch.device("meta"):
        loaded = loads_objects(text, b"".join(side))["t"]
    assert loaded[0].device.type == "cpu" and torch.equal(loaded[0], torch.arange(3.0))
