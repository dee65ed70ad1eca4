"""Tensors of torchao and optimum-quanto: saved and loaded bit for bit, or filled by their own
`copy_`. Skipped where the packages are not installed (tests/requirements-optional.txt), but for
what a checkpoint of such tensors is there. Those of Transformer Engine, which has no CPU, have a
stand-in in test_megatron_quantized.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocked import Blocked

import torch_ckpt
from torch_ckpt.dcp.read.targets import memories_of, same_parts
from torch_ckpt.errors import MissingKeyError, UnsupportedError

VALUES = torch.linspace(-1, 1, 64 * 64).view(64, 64)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch_ckpt.save({"weight": VALUES}, tmp_path / "plain")
    return tmp_path / "plain"


def assert_comes_back(make: Callable[[], torch.Tensor], path: Path) -> None:
    """Saved, and loaded into another one of its class, every bit is the same."""
    value = make()
    for save in (torch_ckpt.save, lambda *given: torch_ckpt.async_save(*given).result()):
        save({"weight": value}, path)
        target = make()
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            for part in memories_of(getattr(target, name)):
                part.zero_()
        torch_ckpt.load({"weight": target}, path)
        assert str(target.__tensor_flatten__()) == str((names, context))  # type: ignore[attr-defined]
        for name in names:
            wanted, got = (memories_of(getattr(each, name)) for each in (value, target))
            assert wanted and same_parts(wanted, got), name
    with pytest.raises(
        MissingKeyError, match=rf"the inner tensors of a .*\.{type(value).__name__}"
    ):
        torch_ckpt.load({"weight": torch.zeros(value.shape)}, path)


@pytest.mark.parametrize(
    "kind",
    [
        "subclass_8bit.OptimState8bit",
        "subclass_4bit.OptimState4bit",
        "subclass_fp8.OptimStateFp8",
    ],
)
def test_states_of_an_optimizer_in_few_bits(tmp_path: Path, plain: Path, kind: str) -> None:
    module, _, name = kind.partition(".")
    made = pytest.importorskip(f"torchao.optim.{module}")
    state = getattr(made, name).zeros((64, 64), block_size=64)

    def make() -> torch.Tensor:
        new: torch.Tensor = getattr(made, name).zeros((64, 64), block_size=64)
        return new.copy_(VALUES)

    assert_comes_back(make, tmp_path / "c")
    wanted = getattr(made, name).zeros((64, 64), block_size=64)
    wanted.copy_(VALUES)  # as stock does
    for _ in range(2):
        torch_ckpt.load({"weight": state}, plain)
        assert torch.equal(state.dequantize(), wanted.dequantize())
    assert (state.dequantize() - VALUES).abs().max() < 0.2


@pytest.mark.parametrize(
    "config", ["Int8WeightOnly", "IntxWeightOnly", "Float8WeightOnly", "Int8DynamicActivationIntx"]
)
def test_quantized_weights_of_torchao(tmp_path: Path, plain: Path, config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    name = config + ("WeightConfig" if config.endswith("Intx") else "Config")

    def make() -> torch.Tensor:
        linear = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
        quantization.quantize_(linear, getattr(quantization, name)())
        return linear.weight

    assert_comes_back(make, tmp_path / "c")
    # Its copy_ knows only its like.
    linear = torch.nn.Linear(64, 64)
    quantization.quantize_(linear, getattr(quantization, name)())
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


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qint4", "qint2"])
def test_quantized_weights_of_quanto(tmp_path: Path, plain: Path, kind: str) -> None:
    quanto = pytest.importorskip("optimum.quanto")

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(128, 64))
        quanto.quantize(model, weights=getattr(quanto, kind))
        quanto.freeze(model)
        return model

    assert_comes_back(lambda: make()[0].weight, tmp_path / "c")
    # What a state dict has of it is plain.
    torch_ckpt.save(make().state_dict(), tmp_path / "c")


def test_quanto_takes_no_plain_tensor(plain: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    weight = model[0].weight
    before = weight._data.clone()
    with pytest.raises(UnsupportedError, match="tensor 'weight': its target, of class optimum"):
        torch_ckpt.load({"weight": weight}, plain)
    assert torch.equal(weight._data, before)


class Float8(Blocked):
    """float8 codes with scales, of a package that cannot be imported."""

    __module__ = "package_that_is_not_here"

    def dequantize(self) -> torch.Tensor:
        raise AssertionError("what it is made of is saved")


def test_what_was_saved_is_read_where_the_package_is_not(tmp_path: Path) -> None:
    value = Float8(VALUES.to(torch.float8_e4m3fn), torch.linspace(1, 2, 4), torch.ones(1))
    torch_ckpt.save({"weight": value}, tmp_path / "c")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(Float8.__module__)
    found: Any = torch_ckpt.load(path=tmp_path / "c")["weight"]
    assert list(found) == ["codes", "scale", "table"]
    for name, part in found.items():
        wanted = getattr(value, name)
        assert part.dtype == wanted.dtype
        assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8)), name
    with pytest.raises(
        MissingKeyError, match=r"the inner tensors of a package_that_is_not_here\.Float8"
    ):
        torch_ckpt.load({"weight": torch.zeros(64, 64)}, tmp_path / "c")
