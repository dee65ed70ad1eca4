"""Names of tensors: any text comes back, from the checkpoint and from the consolidated file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt._core import names_text

# UTF-8 cannot say lone surrogates, and docs/format.md forbids NUL.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAMES = st.text(LETTERS, min_size=1, max_size=8)
ODD = st.sampled_from(["a\nb", "\n", "a\n", "a.b", ".", 'quo"te', "back\\slash", "\x85", "\r"])


@given(st.lists(NAMES | ODD, min_size=1, max_size=6, unique=True))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
