"""Tensors of torchao and optimum-quanto: refused by name, or filled by their own `copy_`. Skipped
where the packages are not installed (tests/requirements-optional.txt)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt.errors import UnsupportedError

VALUES = torch.linspace(-1, 1, 64 * 64).view(64, 64)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch_ckpt.save({"weight": VALUES}, tmp_path / "plain")
    return tmp_path / "plain"


def assert_not_saved(value: torch.Tensor, path: Path) -> None:
    name = rf"tensor 'weight': is of class .*\.{type(value).__name__}"
    with pytest.raises(UnsupportedError, match=name):
        torch_ckpt.save({"weight": value}, path)
    with pytest.raises(UnsupportedError, match=name):
        torch_ckpt.async_save({"weight": value}, path).result()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["subclass_8bit.OptimState8bit", "subclass_4bit.OptimState4bit"])
def test_states_of_an_optimizer_in_few_bits(tmp_path: Path, plain: Path, kind: str) -> None:
    module, _, name = kind.partition(".")
    made = pytest.importorskip(f"torchao.optim.{module}")
    state = getattr(made, name).zeros((64, 64), True, 64)
    assert_not_saved(state, tmp_path / "c")
    wanted = getattr(made, name).zeros((64, 64), True, 64)
    wanted.copy_(VALUES)  # as stock does
    for _ in range(2):
        torch_ckpt.load({"weight": state}, plain)
        assert torch.equal(state.dequantize(), wanted.dequantize())
    assert (state.dequantize() - VALUES).abs().max() < 0.2


def test_quantized_weights_of_torchao(tmp_path: Path, plain: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 64)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    assert_not_saved(linear.weight, tmp_path / "c")
    # Its copy_ knows only its like.
    with pytest.raises(UnsupportedError, match="tensor 'weight': its target, of class torchao"):
        torch_ckpt.load({"weight": linear.weight}, plain)


def test_weights_of_float8_training(tmp_path: Path, plain: Path) -> None:
    utils = pytest.importorskip("torchao.float8.fsdp_utils")
    for scale in ((), (torch.ones(()),)):
        make: Any = utils.WeightWithDynamicFloat8CastTensor
        weight = make(VALUES.clone(), None, torch.float8_e4m3fn, *scale)
        torch_ckpt.save({"weight": torch.nn.Parameter(weight)}, tmp_path / "c")
        target = make(torch.zeros(64, 64), None, torch.float8_e4m3fn, *scale)
        torch_ckpt.load({"weight": target}, tmp_path / "c")
        assert torch.equal(target._tensor, VALUES)


def test_quantized_weights_of_quanto(tmp_path: Path, plain: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    weight = model[0].weight
    assert_not_saved(weight, tmp_path / "c")
    before = weight._data.clone()
    with pytest.raises(UnsupportedError, match="tensor 'weight': its target, of class optimum"):
        torch_ckpt.load({"weight": weight}, plain)
    assert torch.equal(weight._data, before)
    # What a state dict has of it is plain.
    torch_ckpt.save(model.state_dict(), tmp_path / "c")
