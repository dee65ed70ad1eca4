"""save_model under a tensor_mapping: the same pairs, the other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_scaled_models import Model
from test_tensor_mapping import drawn_parts, numbered, small_moe

import torch_ckpt


def saved(path: Path, pairs: Any, **natives: torch.Tensor) -> dict[str, torch.Tensor]:
    torch_ckpt.save_model(Model(**natives), path, tensor_mapping=pairs)
    return load_file(path / "model.safetensors")


def check(path: Path, pairs: Any, natives: dict[str, torch.Tensor], wanted: Any) -> None:
    found = saved(path, pairs, **natives)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and torch.equal(found[name], value), name
    fresh = Model(**{name: torch.full_like(value, -7) for name, value in natives.items()})
    torch_ckpt.load_model(fresh, path, tensor_mapping=pairs)
    for name, value in fresh.named_parameters():
        assert torch.equal(value, natives[name]), name


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole, leaves = drawn_parts(data)
    parts = {f"p.{n}": leaf[1].contiguous() for n, leaf in enumerate(leaves)}
    views = [leaf[0] for leaf in leaves]
    folder = tmp_path_factory.mktemp("m")
    pairs = [(f"p.{n}", view) for n, view in enumerate(views)]
    check(folder / "parts", pairs, {"w": whole}, parts)
    pairs = [(view, f"p.{n}") for n, view in enumerate(views)]
    check(folder / "whole", pairs, parts, {"w": whole})


def test_what_pairs_leave_out(tmp_path: Path) -> None:
    """Padding of the model is not stored; names that no pair has stay."""
    pairs = [("v", "m.v[: 5]"), ("0", "m.v[5 :]")]
    found = saved(tmp_path / "c", pairs, **{"m.v": numbered(8, 2), "b": torch.ones(2)})
    assert sorted(found) == ["b", "v"]
    assert torch.equal(found["v"], numbered(8, 2)[:5])


def test_a_stored_name_that_another_tensor_has(tmp_path: Path) -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"'b'.*no pair names"):
        saved(tmp_path / "c", [("b", "a")], a=torch.ones(2), b=torch.ones(2))
    assert not (tmp_path / "c").exists()


def test_what_has_no_elements_is_stored_too(tmp_path: Path) -> None:
    pairs = [("a.{e}", "w[{e}]"), ("v", "m.v")]
    natives = {"w": torch.zeros(2, 3, 0), "m.v": torch.zeros(0, 4)}
    parts = {"a.0": torch.zeros(3, 0), "a.1": torch.zeros(3, 0), "v": torch.zeros(0, 4)}
    check(tmp_path / "c", pairs, natives, parts)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("v[5 :]", "0")], ["('v[5 :]', '0')", "nothing says"]),
        ([("a[0/2]", "w")], ["a", "24 elements", "(8, 6)"]),
        ([("a", "w[0/2]")], ["w", "once"]),
        ([("a", "w[0/2]"), ("a", "w[1/2]")], ["a", "twice"]),
        ([("a[: 3]", "w")], ["(3, 6)", "(4, 6)"]),
    ],
)
def test_what_is_no_mapping(tmp_path: Path, pairs: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        saved(tmp_path / "c", pairs, w=numbered(4, 6))
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert not (tmp_path / "c").exists()


def test_experts_of_transformers(tmp_path: Path) -> None:
    """transformers reads what we write, and we what it writes."""
    model = transformers.Qwen3MoeForCausalLM(small_moe())
    torch_ckpt.save_model(model, tmp_path / "ours", tensor_mapping="qwen3_moe")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    read = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours")
    for name, value in read.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("background", [False, True])
def test_every_step_of_a_run_has_the_stored_names(tmp_path: Path, background: bool) -> None:
    pairs = [("e.{e}.up", "n.up[{e}].T"), ("e.{e}.down", "n.down[{e}]")]

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch_ckpt.Checkpointer]:
        torch.manual_seed(3)
        model = Model(
            **{"n.up": torch.randn(3, 4, 6), "n.down": torch.randn(3, 4, 6), "b": torch.randn(2)}
        )
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = torch_ckpt.Checkpointer(
            tmp_path / "run", model, optimizer, background=background, tensor_mapping=pairs
        )
        return model, optimizer, checkpointer

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, checkpointer = begin()
    train(model, optimizer)
    checkpointer.save(1).result()
    checkpointer.close()
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    stored = load_file(tmp_path / "run/step-1/model/model.safetensors")
    assert sorted(stored) == [
        "b",
        *(f"e.{e}.{name}" for e in range(3) for name in ("down", "up")),
    ]
    for e in range(3):
        assert torch.equal(stored[f"e.{e}.up"], wanted["n.up"][e].T)
    train(model, optimizer)
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    fresh, optimizer, checkpointer = begin()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(9)
    assert checkpointer.load() == 1
    for name, value in fresh.named_parameters():
        assert torch.equal(value, wanted[name]), name
    train(fresh, optimizer)  # with the moments that the other had
    for name, value in fresh.named_parameters():
        assert torch.equal(value, after[name]), name
    checkpointer.close()
