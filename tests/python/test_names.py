"""Names of tensors: any text comes back, from the checkpoint and from the consolidated file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt.native.core import names_text

# UTF-8 cannot say lone surrogates, and docs/format.md forbids NUL.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAMES = st.text(LETTERS, min_size=1, max_size=8)
ODD = st.sampled_from(["a\nb", "\n", "a\n", "a.b", ".", 'quo"te', "back\\slash", "\x85", "\r"])


@given(st.lists(NAMES | ODD, min_size=1, max_size=6, unique=True))
@settings(max_examples=25)
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    path = tmp_path_factory.mktemp("names") / "c"
    saved = {name: torch.full((i + 1,), float(i)) for i, name in enumerate(names)}
    writer = torch_ckpt.HuggingFaceStorageWriter(
        path, save_distributed=True, enable_consolidation=True
    )
    torch_ckpt.save(saved, storage_writer=writer, no_dist=True)
    final = load_file(path / "model-00001-of-00001.safetensors")
    assert set(final) == set(names)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    torch_ckpt.load(loaded, checkpoint_id=path / "sharded", no_dist=True)
    for name, tensor in saved.items():
        assert torch.equal(final[name], tensor) and torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("names", [[], [""], ["a"], ["a", "b"], ["a\nb"], ["a", "\n"]], ids=repr)
def test_names_of_a_request(names: list[str]) -> None:
    """What the core takes from the text, a name a line, is what was put in."""
    text = names_text(names)
    assert (text.split("\n") if isinstance(text, str) else text) == names
    assert isinstance(text, str) == (names != [] and not any("\n" in name for name in names))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | ODD, unique=True))
@settings(max_examples=25)
def test_any_keys_of_objects_come_back(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str]
) -> None:
    path = tmp_path_factory.mktemp("names") / "c"
    saved = {"stoi": {key: i for i, key in enumerate(keys)}, "w": torch.ones(1)}
    torch_ckpt.save(saved, checkpoint_id=path, no_dist=True)
    target = {"stoi": dict.fromkeys(keys, -1), "w": torch.zeros(1)}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    assert target["stoi"] == saved["stoi"]
    whole: dict[str, object] = {}
    planner = torch_ckpt.LoadPlanner(rebuild=True)
    torch_ckpt.load(whole, checkpoint_id=path, planner=planner, no_dist=True)
    assert whole["stoi"] == saved["stoi"]


def test_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    """NUL among them, which no tensor's name may hold."""
    saved = {"w": torch.ones(1), "stoi": {chr(i): i for i in range(256)}}
    writer = torch_ckpt.HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True)
    dcp.save(saved, storage_writer=writer)
    target = {"w": torch.zeros(1), "stoi": {chr(i): 0 for i in range(256)}}
    dcp.load(target, storage_reader=torch_ckpt.HuggingFaceStorageReader(tmp_path / "c"))
    assert target["stoi"] == saved["stoi"]
    torch_ckpt.consolidate_safetensors_files(tmp_path / "c", tmp_path / "out", None)
    found = torch_ckpt.Checkpoint(tmp_path / "out").describe()
    assert {entry.name for entry in found.objects} == {f"stoi.{chr(i)}" for i in range(256)}


@pytest.mark.parametrize("name", ["x" * 65_536, "é" * 40_000, "a\ud800"], ids=["x", "é", "alone"])
@pytest.mark.parametrize("value", [5, torch.ones(1)], ids=["object", "tensor"])
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_cannot_be(tmp_path: Path, name: str, value: object, nested: bool) -> None:
    """They are refused, and what was saved before stays."""
    torch_ckpt.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(1), **({"cache": {name: value}} if nested else {name: value})}
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="UTF-8|bytes|too long"):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(1)}
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert target["w"].item() == 1
