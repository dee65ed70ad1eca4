"""convert makes numbers of codes and scales while it streams, where a dtype asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scaled_bases
import torch
from safetensors.torch import load_file

import torch_ckpt

KINDS = scaled_bases.kinds(torch.Generator().manual_seed(6))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path: Path, kind: str) -> None:
    stored, whole = KINDS[kind]
    path = scaled_bases.base(tmp_path / "base", {**stored, "b": torch.ones(3)})
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    name = next(iter(stored)).removesuffix("_blocks")
    assert sorted(found) == sorted([name, "b"])
    assert torch.equal(found[name], whole.bfloat16())
    assert found["b"].dtype is torch.bfloat16


def test_larger_than_a_piece(tmp_path: Path) -> None:
    """Pieces of 4 MiB begin and end in the middle of blocks, rows and experts."""
    generator = torch.Generator().manual_seed(7)
    codes = scaled_bases.float8((3, 1900, 1777), torch.float8_e4m3fn, generator)
    grid = scaled_bases.scales((3, 15, 14), torch.float32, generator)
    blocks = scaled_bases.packed((2, 3000, 50, 16), generator)
    powers = scaled_bases.scales((2, 3000, 50), torch.uint8, generator)
    stored = {"e": codes, "e_scale_inv": grid, "x_blocks": blocks, "x_scales": powers}
    path = scaled_bases.base(tmp_path / "base", stored)
    for dtype in (torch.bfloat16, torch.float32):
        out = tmp_path / str(dtype)
        torch_ckpt.convert(path, out, "hf", dtype=dtype, memory_budget="64MiB")
        found = load_file(out / "model.safetensors")
        assert torch.equal(found["e"], scaled_bases.numbers(codes, grid, (128, 128)).to(dtype))
        x = scaled_bases.numbers(scaled_bases.unpacked(blocks.flatten(-2)), powers, (1, 32))
        assert torch.equal(found["x"], x.to(dtype))


@pytest.mark.parametrize("to", ["torch_ckpt", "dcp", "torch"])
def test_into_other_formats(tmp_path: Path, to: str) -> None:
    stored, whole = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    path = scaled_bases.base(tmp_path / "base", stored)
    torch_ckpt.convert(path, tmp_path / "out", to, dtype="bf16")  # type: ignore[arg-type]
    loaded = torch_ckpt.load(path=tmp_path / "out")
    assert list(loaded) == ["m.weight"] and torch.equal(loaded["m.weight"], whole.bfloat16())


def test_the_configuration_says_no_quantization(tmp_path: Path) -> None:
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    path = scaled_bases.base(
        tmp_path / "base",
        stored,
        dtype="float8",
        quantization_config=FP8,
        text_config={"quantization_config": FP8, "layers": 2},
    )
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {"dtype": "bfloat16", "text_config": {"layers": 2}}


def test_without_a_dtype_codes_stay_codes(tmp_path: Path) -> None:
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config=FP8)
    torch_ckpt.convert(path, tmp_path / "out", "hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == stored.keys()
    assert found["m.weight"].dtype is torch.float8_e4m3fn
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["quantization_config"] == FP8


def test_scales_of_activations_do_not_go_along(tmp_path: Path) -> None:
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    more = {"m.input_scale": torch.ones(1), "m.k_scale": torch.tensor(1.0)}
    own = {"m.q_scale": torch.ones(8)}  # a part of the model, since it is no one number
    path = scaled_bases.base(tmp_path / "base", {**stored, **more, **own})
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["m.q_scale", "m.weight"]


def test_some_by_name(tmp_path: Path) -> None:
    stored, whole = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    both = {**stored, **{name.replace("m.", "n."): value for name, value in stored.items()}}
    path = scaled_bases.base(tmp_path / "base", both)
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype={"m.weight": "f32"})
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["m.weight", "n.weight", "n.weight_scale_inv"]
    assert torch.equal(found["m.weight"], whole)


def test_what_is_refused(tmp_path: Path) -> None:
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    path = scaled_bases.base(
        tmp_path / "base", {"m.weight": stored["m.weight"]}, quantization_config=FP8
    )
    with pytest.raises(torch_ckpt.IncompleteError, match=r"m\.weight.*has no scales"):
        torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16")
    large = {"m.weight": stored["m.weight"], "m.weight_scale": torch.tensor(1e9)}
    path = scaled_bases.base(tmp_path / "large", large)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"m\.weight.*out of range as F16"):
        torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_some_codes_do_not_stay_where_others_become_numbers(tmp_path: Path) -> None:
    """config.json says one of all."""
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    stored = stored | {name.replace("m.", "n."): value for name, value in stored.items()}
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config=FP8)
    with pytest.raises(torch_ckpt.UnsupportedError, match="one of all") as caught:
        torch_ckpt.convert(path, tmp_path / "out", "hf", dtype={"m.weight": "bf16"})
    assert caught.value.tensor == "n.weight"
    assert not (tmp_path / "out").exists()


def test_scales_of_codes_that_stay_keep_their_dtype(tmp_path: Path) -> None:
    stored, _ = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    small = stored["m.weight_scale_inv"] * 1e-4
    path = scaled_bases.base(tmp_path / "base", stored | {"m.weight_scale_inv": small})
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="float8_e4m3fn")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["m.weight_scale_inv"], small)


def test_what_is_left_out_need_not_fit(tmp_path: Path) -> None:
    stored, whole = KINDS["float8_e4m3fn float32 m.weight_scale_inv"]
    head = {"head.weight": stored["m.weight"], "head.weight_scale_inv": torch.ones(7, 7)}
    path = scaled_bases.base(tmp_path / "base", stored | head)
    torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16", exclude="head*")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["m.weight"], whole.bfloat16()) and found.keys() == {"m.weight"}
