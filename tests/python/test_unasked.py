"""What the target lacks of a checkpoint, and the checkpoint of the target: said once, by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import torch_ckpt
from torch_ckpt.dcp.plan import load_planner


def ones(*names: str) -> dict[str, Any]:
    return {name: torch.ones(2) for name in names}


def loaded(
    path: Path, target: dict[str, Any], caplog: pytest.LogCaptureFixture, **options: Any
) -> list[str]:
    """What is logged while `target` is loaded."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        planner = torch_ckpt.LoadPlanner(**options)
        torch_ckpt.load(target, checkpoint_id=path, planner=planner)
    return [record.getMessage() for record in caplog.records]


def test_values_that_a_model_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"model": ones("a", "b", "c", "head"), "step": 5}
    torch_ckpt.save(saved, checkpoint_id=tmp_path / "c")
    (said,) = loaded(tmp_path / "c", {"model": ones("a", "b", "c")}, caplog)
    assert said.endswith("the target has no place for; they are not loaded: model.head")
    # The same where the names are those of one flat dict.
    torch_ckpt.save(ones("a", "b", "c", "head"), checkpoint_id=tmp_path / "flat")
    assert len(loaded(tmp_path / "flat", ones("a", "b", "c"), caplog)) == 1


def test_an_optimizer_without_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a fresh optimizer the state is empty, and would stay so without a word."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch_ckpt.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    fresh = torch.optim.Adam(model.parameters())
    (said,) = loaded(tmp_path / "c", {"model": model, "optimizer": fresh}, caplog)
    assert "optimizer.state.0.exp_avg" in said and said.count("optimizer.state.") == 6
    assert len(loaded(tmp_path / "c", {}, caplog)) == 1, "nothing is asked for"


def test_what_is_left_on_purpose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"model": ones("a", "b", "c"), "optimizer": {"state": ones("x")}, "step": 5}
    torch_ckpt.save(saved, checkpoint_id=tmp_path / "c")
    assert loaded(tmp_path / "c", {"model": ones("a", "b", "c")}, caplog) == []
    assert loaded(tmp_path / "c", {"model": ones("a")}, caplog) == []
    assert loaded(tmp_path / "c", saved, caplog) == []
    assert loaded(tmp_path / "c", {}, caplog, rebuild=True) == []


def test_all_missing_names_are_in_one_error(tmp_path: Path) -> None:
    torch_ckpt.save(ones("a"), checkpoint_id=tmp_path / "c")
    target = ones("a", *(f"m{i}" for i in range(23)))
    with pytest.raises(torch_ckpt.IncompleteError, match="Missing 23 keys.*m0, m1,.*and 3 more"):
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c")


def test_many_missing_names_cost_one_look(tmp_path: Path) -> None:
    torch_ckpt.save({"a": {}, **ones("b")}, checkpoint_id=tmp_path / "c")
    target = ones(*(f"m{i}" for i in range(500)))
    planner = torch_ckpt.LoadPlanner(allow_partial_load=True)
    sizes, structure = load_planner.saved_world_sizes, load_planner._saved_structure
    with (
        mock.patch.object(load_planner, "saved_world_sizes", side_effect=sizes) as walks,
        mock.patch.object(load_planner, "_saved_structure", side_effect=structure) as looks,
    ):
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=planner)
    assert (walks.call_count, looks.call_count) == (1, 1)


def test_a_tied_weight_that_is_stored_once(tmp_path: Path) -> None:
    """As small models of the Hub are: `lm_head.weight` is the embedding, and not in the file."""
    save_file({"embed.weight": torch.arange(6.0)}, tmp_path / "model.safetensors")
    weight = torch.zeros(6)
    target = {"embed.weight": weight, "lm_head.weight": weight}
    torch_ckpt.load(target, checkpoint_id=tmp_path)
    assert weight.tolist() == [0, 1, 2, 3, 4, 5] and target["lm_head.weight"] is weight
    # A part of that memory, or other memory, is not filled.
    for other in (weight[:3], torch.zeros(6)):
        with pytest.raises(torch_ckpt.IncompleteError, match="Missing key.*lm_head.weight"):
            torch_ckpt.load({**target, "lm_head.weight": other}, checkpoint_id=tmp_path)
