"""load_model of bases whose weights are codes and scales: every kind, in every float."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
from torch import nn

import torch_ckpt
from torch_ckpt.training.models import LoadReport

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KINDS = scaled_bases.kinds(torch.Generator().manual_seed(5))


class Model(nn.Module):
    """One parameter under a name with dots."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            *modules, last = name.split(".")
            at: nn.Module = self
            for module in modules:
                if not hasattr(at, module):
                    at.add_module(module, nn.Module())
                at = getattr(at, module)
            at.register_parameter(last, nn.Parameter(value, requires_grad=False))


def name_of(stored: dict[str, torch.Tensor]) -> str:
    first = next(iter(stored))
    return first.removesuffix("_blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path: Path, kind: str) -> None:
    stored, whole = KINDS[kind]
    path = scaled_bases.base(tmp_path / "base", stored)
    for dtype in DTYPES:
        if dtype is torch.float16 and whole.abs().max() > 65504:
            continue
        model = Model(**{name_of(stored): torch.zeros(whole.shape, dtype=dtype)})
        report = torch_ckpt.load_model(model, path)
        assert report == LoadReport([], [])
        (loaded,) = model.parameters()
        assert torch.equal(loaded, whole.to(dtype))


def test_a_value_that_is_lost_is_an_error(tmp_path: Path) -> None:
    codes = torch.full((4, 4), 400.0).to(torch.float8_e4m3fn)
    stored = {"m.weight": codes, "m.weight_scale": torch.tensor(1000.0)}
    path = scaled_bases.base(tmp_path / "base", stored)
    model = Model(**{"m.weight": torch.zeros(4, 4, dtype=torch.float16)})
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"m\.weight.*out of range as F16"):
        torch_ckpt.load_model(model, path)


def test_blocks_are_those_of_the_configuration(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = scaled_bases.float8((100, 70), torch.float8_e4m3fn, generator)
    grid = scaled_bases.scales((4, 2), torch.float32, generator)
    path = scaled_bases.base(
        tmp_path / "base",
        {"m.weight": codes, "m.weight_scale_inv": grid},
        quantization_config={"quant_method": "fp8", "weight_block_size": [32, 64]},
    )
    model = Model(**{"m.weight": torch.zeros(100, 70)})
    torch_ckpt.load_model(model, path)
    assert torch.equal(next(model.parameters()), scaled_bases.numbers(codes, grid, (32, 64)))


def test_a_model_of_codes_gets_codes(tmp_path: Path) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    stored = {"m.weight": codes, "m.weight_scale_inv": torch.tensor([[3.0]])}
    path = scaled_bases.base(tmp_path / "base", stored)
    model = Model(**{name: torch.zeros_like(value) for name, value in stored.items()})
    torch_ckpt.load_model(model, path)
    for name, value in model.named_parameters():
        assert torch.equal(value.float(), stored[name].float())


def test_numbers_and_codes_are_not_mixed_in_silence(tmp_path: Path) -> None:
    """A model of floats that has one of the scales as well."""
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    stored = {f"{name}.weight": codes for name in "ab"}
    stored |= {f"{name}.weight_scale": torch.tensor(2.0) for name in "ab"}
    path = scaled_bases.base(tmp_path / "base", stored)
    floats = {f"{name}.weight": torch.zeros(4, 4) for name in "ab"}
    model = Model(**floats, **{"b.weight_scale": torch.tensor(0.0)})
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'b\.weight'.*codes and scales"):
        torch_ckpt.load_model(model, path)
    assert not any(value.any() for value in model.parameters())


def test_scales_of_activations_are_nobodys(tmp_path: Path) -> None:
    stored = {
        "m.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "m.weight_scale": torch.tensor(2.0),
        "m.input_scale": torch.tensor(2.0),
        "m.k_scale": torch.tensor(2.0),
    }
    path = scaled_bases.base(tmp_path / "base", stored)
    model = Model(**{"m.weight": torch.zeros(4, 4)})
    assert torch_ckpt.load_model(model, path) == LoadReport([], [])
    assert next(model.parameters()).eq(2).all()


def test_under_other_names(tmp_path: Path) -> None:
    stored = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.tensor(2.0),
    }
    path = scaled_bases.base(tmp_path / "base", stored)
    model = Model(**{"b.weight": torch.zeros(4, 4)})
    torch_ckpt.load_model(model, path, key_mapping=[(r"^a\.", "b.")])
    assert next(model.parameters()).eq(2).all()


def test_the_configuration_forgets_it(tmp_path: Path) -> None:
    class Config:
        quantization_config: Any = None
        text_config: Any = None

    stored = {
        "m.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "m.weight_scale": torch.tensor(2.0),
    }
    path = scaled_bases.base(tmp_path / "base", stored)
    model: Any = Model(**{"m.weight": torch.zeros(4, 4)})
    model.config = Config()
    model.config.text_config = Config()
    for config in (model.config, model.config.text_config):
        config.quantization_config = {"quant_method": "fp8"}
    torch_ckpt.load_model(model, path)
    for config in (model.config, model.config.text_config):
        assert "quantization_config" not in vars(config)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CODES = torch.ones(300, 300).to(torch.float8_e4m3fn)
GRID = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("stored", "config", "words"),
    [
        # Scales that do not fit.
        ({"m.weight": CODES, "m.weight_scale_inv": torch.ones(2, 3)}, FP8, [
            "'m.weight'", "(300, 300)", "'m.weight_scale_inv'", "(2, 3)", "(128, 128)",
        ]),
        ({"m.weight": CODES, "m.weight_scale_inv": GRID},
         {**FP8, "weight_block_size": [64, 64]}, ["'m.weight'", "(3, 3)", "(64, 64)"]),
        ({"m.weight": CODES, "m.weight_scale_inv": GRID.double()}, FP8, ["'m.weight'", "F64"]),
        ({"m.weight": CODES, "m.weight_scale_inv": GRID, "m.weight_scale": GRID}, FP8,
         ["'m.weight'", "twice"]),
        ({"m.weight": CODES, "m.weight_scale": GRID, "m.weight_zero_point": GRID}, FP8,
         ["m.weight_zero_point"]),
        # Codes or scales alone.
        ({"m.weight": CODES}, FP8, ["'m.weight'", "fp8", "no scales"]),
        ({"m.weight_scale_inv": GRID}, FP8, ["m.weight_scale_inv", "not there"]),
        ({"m.weight_blocks": torch.ones(300, 10, 16, dtype=torch.uint8)},
         {"quant_method": "mxfp4"}, ["m.weight_blocks", "mxfp4", "no scales"]),
        ({"m.weight_blocks": torch.ones(300, 10, 16, dtype=torch.uint8),
          "m.weight_scales": torch.ones(300, 9, dtype=torch.uint8)},
         {"quant_method": "mxfp4"}, ["m.weight_blocks", "(300, 10, 16)", "(300, 9)"]),
        # Other methods.
        ({"m.weight": torch.ones(45000, 1, dtype=torch.uint8)},
         {"quant_method": "bitsandbytes"},
         ["'m.weight'", "bitsandbytes", "[45000, 1]", "(300, 300)"]),
        ({"m.weight.qweight": torch.ones(3, dtype=torch.int32)}, {"quant_method": "gptq"},
         ["'m.weight'", "gptq", "(300, 300)"]),
        ({"m.weight": CODES, "m.weight_scale": GRID},
         {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
             "group_0": {"weights": {"type": "int", "num_bits": 4, "symmetric": False}}}},
         ["'m.weight'", "pack-quantized", "4 bits of int", "zero points"]),
        ({"m.weight": torch.ones(300, 150, dtype=torch.uint8),
          "m.weight_scale": torch.ones(300, 19).to(torch.float8_e4m3fn)},
         {"quant_method": "modelopt", "quant_algo": "NVFP4"},
         ["'m.weight'", "modelopt", "NVFP4"]),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(
    tmp_path: Path, stored: dict[str, torch.Tensor], config: dict[str, Any], words: list[str]
) -> None:
    path = scaled_bases.base(
        tmp_path / "base", {**stored, "b": torch.ones(2)}, quantization_config=config
    )
    model = Model(**{"m.weight": torch.zeros(300, 300), "b": torch.zeros(2)})
    with pytest.raises(torch_ckpt.CheckpointError) as caught:
        torch_ckpt.load_model(model, path, strict=False)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert not any(value.any() for value in model.parameters())  # before anything was read


def test_scales_that_nobody_wants_may_not_fit(tmp_path: Path) -> None:
    """Of a model that has codes and scales itself, or whose layer is something else."""
    stored = {"m.weight": CODES, "m.weight_scale": torch.ones(7), "b": torch.ones(2)}
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config=FP8)
    empty = {name: torch.zeros_like(value) for name, value in stored.items()}
    model = Model(**empty)
    torch_ckpt.load_model(model, path)
    for name, value in model.named_parameters():
        assert torch.equal(value.float(), stored[name].float()), name
    model = Model(b=torch.zeros(2))
    assert torch_ckpt.load_model(model, path, strict=False).unexpected == [
        "m.weight",
        "m.weight_scale",
    ]
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"m.weight_scale.*\(7\)"):
        torch_ckpt.load_model(Model(**{"m.weight": torch.zeros(300, 300)}), path, strict=False)


def test_a_model_of_another_method_that_has_its_own_tensors(tmp_path: Path) -> None:
    """Its floats may be tied, left out or missing."""
    stored = {"m.qweight": torch.ones(3, dtype=torch.int32), "m.scales": torch.ones(2)}
    stored["e.weight"] = torch.ones(4, 2)
    path = scaled_bases.base(
        tmp_path / "base", stored, quantization_config={"quant_method": "gptq"}
    )
    embedding, missing = torch.zeros(4, 2), torch.full((2,), 7.0)
    model = Model(**{name: torch.zeros_like(value) for name, value in stored.items()})
    model.head, model.more = torch.nn.Module(), torch.nn.Module()
    model.head.weight = model.e.weight
    model.more.weight = torch.nn.Parameter(missing, requires_grad=False)
    assert torch_ckpt.load_model(model, path, strict=False).missing == ["more.weight"]
    assert model.head.weight.eq(1).all() and model.m.qweight.eq(1).all()
    assert missing.eq(7).all() and not embedding.any()
    assert torch_ckpt.load_model(model, path, skip="more.") == LoadReport([], [])
    model = Model(**{"m.weight": torch.zeros(3, 2), "e.weight": embedding})
    with pytest.raises(torch_ckpt.UnsupportedError, match="gptq"):
        torch_ckpt.load_model(model, path, strict=False)
    torch_ckpt.load_model(model, path, strict=False, skip="m.")
    assert embedding.eq(1).all()


def test_what_the_configuration_leaves_plain(tmp_path: Path) -> None:
    stored = {"m.weight": CODES, "head.weight": torch.ones(3)}
    for plain in ("m", "re:^m$"):
        path = scaled_bases.base(
            tmp_path / plain[:2], stored, quantization_config={**FP8, "ignore": [plain]}
        )
        model = Model(**{"m.weight": torch.zeros(300, 300), "head.weight": torch.zeros(3)})
        torch_ckpt.load_model(model, path)
        assert all(value.eq(1).all() for value in model.parameters())


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    stored = {"m.weight": CODES, "m.weight_scale": torch.tensor(2.0)}
    path = scaled_bases.base(tmp_path / "base", stored)
    for text in ("{", "[]", json.dumps({"quantization_config": 3})):
        (path / "config.json").write_text(text)
        model = Model(**{"m.weight": torch.zeros(300, 300)})
        torch_ckpt.load_model(model, path)
        assert next(model.parameters()).eq(2).all()


def test_codes_under_two_names(tmp_path: Path) -> None:
    """A tied name has no scales of its own."""
    codes = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    state = {"a.weight": codes, "b.weight": codes, "a.weight_scale": torch.tensor(3.0)}
    torch_ckpt.save(state, tmp_path / "c", layout="final")
    assert torch_ckpt.open(tmp_path / "c").keys() == state.keys()
    model = Model(**{"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4, 4)})
    assert torch_ckpt.load_model(model, tmp_path / "c") == LoadReport([], [])
    assert all(value.eq(6).all() for value in model.parameters())
    torch_ckpt.convert(tmp_path / "c", tmp_path / "out", "hf", dtype="bf16")
    found = torch_ckpt.load(None, tmp_path / "out")
    assert all(value.eq(6).all() for value in found.values()), found
