"""float8 codes that mean a number only together with their scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
from safetensors.torch import save_file
from sample_states import FAILED

import torch_ckpt

SCALED = [torch.float8_e4m3fn, torch.float8_e5m2]
REFUSED = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def hub(path: Path, dtype: torch.dtype, scale: str) -> Path:
    """A file as DeepSeek's or transformers' are."""
    path.mkdir()
    tensors = {
        "layer.weight": torch.ones(4, 4).to(dtype),
        f"layer.{scale}": torch.full((1, 1), 0.5),
        "head.weight": torch.ones(2, 2).to(dtype),  # without scales
    }
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_codes_are_not_widened_without_their_scales(
    tmp_path: Path, dtype: torch.dtype, scale: str
) -> None:
    path = hub(tmp_path / "in", dtype, scale)
    for wanted in (torch.bfloat16, torch.float32, torch.float8_e8m0fnu):
        target: dict[str, Any] = {
            "layer.weight": torch.zeros(4, 4).to(wanted),
            "head.weight": torch.zeros(2, 2),
        }
        with pytest.raises(FAILED) as caught:
            torch_ckpt.load(target, path)
        said = str(caught.value)
        assert "'layer.weight'" in said and f"'layer.{scale}'" in said
        assert f"load it as {dtype}" in said
        assert not target["head.weight"].any()  # refused before anything is read


@pytest.mark.parametrize("dtype", SCALED, ids=str)
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_numbers_for_targets_of_floats(tmp_path: Path, dtype: torch.dtype, scale: str) -> None:
    path = hub(tmp_path / "in", dtype, scale)
    for wanted in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        target: dict[str, Any] = {
            "layer.weight": torch.zeros(4, 4).to(wanted),
            "head.weight": torch.zeros(2, 2),
            f"layer.{scale}": torch.zeros(1, 1),
        }
        torch_ckpt.load(target, path)
        assert target["layer.weight"].eq(0.5).all() and target["head.weight"].eq(1).all()
        assert target[f"layer.{scale}"].item() == 0.5
    with pytest.raises(FAILED, match="strict_dtype"):
        torch_ckpt.load(target, path, strict_dtype=True)
    with pytest.raises(FAILED, match=f"load it as {dtype}"):
        torch_ckpt.load({"layer.weight": torch.zeros(4, 4).to(torch.float8_e8m0fnu)}, path)


def test_by_an_opened_checkpoint(tmp_path: Path) -> None:
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    out = torch.zeros(2, 4)
    torch_ckpt.open(path)["layer.weight"].read(slice(1, 3), out=out)
    assert out.eq(0.5).all()


def test_targets_that_the_engine_does_not_fill_in_place(tmp_path: Path) -> None:
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    parameter = torch.nn.Parameter(torch.zeros(4, 4).t())
    conjugate = torch.zeros(4, 4, dtype=torch.complex64).imag
    for target in (parameter, conjugate, torch.zeros(8, 4)[::2]):
        torch_ckpt.load({"layer.weight": target}, path)
        assert target.eq(0.5).all()


def test_boxes_of_a_sharded_save(tmp_path: Path) -> None:
    """Codes and scales that ranks have saved in boxes of their own."""
    generator = torch.Generator().manual_seed(3)
    codes = scaled_bases.float8((300, 300), torch.float8_e4m3fn, generator)
    grid = scaled_bases.scales((3, 3), torch.float32, generator)
    torch_ckpt.save({"m.weight": codes, "m.weight_scale_inv": grid}, tmp_path / "c")
    target = {"m.weight": torch.zeros(300, 300)}
    torch_ckpt.load(target, tmp_path / "c")
    assert torch.equal(target["m.weight"], scaled_bases.numbers(codes, grid, (128, 128)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_bytes_of_two_codes_are_not_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    powers = torch.full((4, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stored = {"m.weight": torch.ones(4, 32, dtype=dtype), "m.scale": powers}
    path = scaled_bases.base(tmp_path / "base", stored)
    target = {"m.weight": torch.zeros(4, 32)}
    with pytest.raises(FAILED, match=r"m\.weight.*two codes each.*m\.scale"):
        torch_ckpt.load(target, path)
    assert not target["m.weight"].any()
    same = {"m.weight": torch.zeros(4, 32, dtype=dtype)}
    torch_ckpt.load(same, path)
    assert same["m.weight"].eq(1).all()


def test_blocks_of_mxfp4_are_not_widened(tmp_path: Path) -> None:
    stored, _ = scaled_bases.kinds(torch.Generator())["mxfp4"]
    path = scaled_bases.base(tmp_path / "base", stored)
    with pytest.raises(FAILED, match=r"m_blocks.*two codes each.*m_scales"):
        torch_ckpt.load({"m_blocks": torch.zeros(stored["m_blocks"].shape)}, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_mxfp4_under_the_name_of_its_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(3))["mxfp4"]
    others = {name.replace("m_", "unasked_"): value for name, value in stored.items()}
    path = scaled_bases.base(tmp_path / "base", stored | others | {"b": torch.ones(2)})
    target = {"m": torch.zeros(whole.shape, dtype=dtype), "b": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert torch.equal(target["m"], whole.to(dtype)) and target["b"].eq(1).all()
    renamed = {"n.w": torch.zeros(whole.shape, dtype=dtype)}
    torch_ckpt.load(renamed, path, key_mapping={"^m$": "n.w"})
    assert torch.equal(renamed["n.w"], whole.to(dtype))
    turned = {"w": torch.zeros(whole.mT.shape, dtype=dtype)}
    torch_ckpt.load(turned, path, tensor_mapping=[("m", "w.T")])
    assert torch.equal(turned["w"], whole.to(dtype).mT)


def test_mxfp4_stays_what_it_is_where_nobody_wants_numbers(tmp_path: Path) -> None:
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(3))["mxfp4"]
    path = scaled_bases.base(tmp_path / "base", stored)
    everything = torch_ckpt.load(None, path)
    assert everything.keys() == stored.keys()
    raw = {name: torch.zeros_like(value) for name, value in stored.items()}
    torch_ckpt.load(raw, path)
    assert all(torch.equal(raw[name], value) for name, value in stored.items())
    with pytest.raises(torch_ckpt.MissingKeyError, match="m"):
        reader = torch_ckpt.CheckpointReader(path)
        planner = torch_ckpt.LoadPlanner(strict_dtype=True)
        torch_ckpt.load({"m": torch.zeros(whole.shape)}, storage_reader=reader, planner=planner)
    with pytest.raises(FAILED, match="expects shape"):
        torch_ckpt.load({"m": torch.zeros(2, 2)}, path)


@pytest.mark.parametrize("kind", ["float8_e4m3fn float32 m.weight_scale_inv", "mxfp4"])
def test_scales_of_numbers_are_not_called_left_out(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(3))[kind]
    others = {"m.bias": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    path = scaled_bases.base(tmp_path / "base", stored | others)
    codes = next(iter(stored)).removesuffix("_blocks")
    target = {name: torch.zeros(2) for name in others}
    torch_ckpt.load({**target, codes: torch.zeros(whole.shape)}, path)
    assert "scale" not in caplog.text and "blocks" not in caplog.text
    raw = {name: torch.zeros_like(value) for name, value in stored.items() if "scale" not in name}
    torch_ckpt.load({**target, **raw}, path)
    assert "scale" in caplog.text
    caplog.clear()
    torch_ckpt.load(dict(target), path)  # without the codes, which are mentioned
    assert codes in caplog.text
    caplog.clear()
    renamed = {name: f"n.{name}" for name in (codes, *target)}
    state = {renamed[name]: torch.zeros(2) for name in others}
    state[renamed[codes]] = torch.zeros(whole.shape)
    torch_ckpt.load(state, path, key_mapping={f"^{name}$": new for name, new in renamed.items()})
    assert "scale" not in caplog.text and "blocks" not in caplog.text


def test_scales_that_a_pattern_leaves_out_are_read(tmp_path: Path) -> None:
    kinds = scaled_bases.kinds(torch.Generator().manual_seed(3))
    stored, whole = kinds["float8_e4m3fn float32 m.weight_scale_inv"]
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config=said)
    target = {"m.weight": torch.zeros(whole.shape)}
    torch_ckpt.load(target, path, include="*.weight")
    assert torch.equal(target["m.weight"], whole)
    assert torch_ckpt.load(None, path, include="*.weight").keys() == {"m.weight"}


BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize("way", ["load", "mapped", "quantized", "convert"])
def test_codes_of_a_method_that_is_not_read(tmp_path: Path, way: str) -> None:
    stored = {
        "m.weight": torch.full((4, 6), 50, dtype=torch.int8),
        "m.SCB": torch.ones(4),
        "head.weight": torch.ones(2, 2),
    }
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config=BNB)
    target = {"w" if way == "mapped" else "m.weight": torch.zeros(4, 6)}
    reader = torch_ckpt.QuantizedHuggingFaceStorageReader(str(path))
    with pytest.raises(torch_ckpt.UnsupportedError, match="bitsandbytes") as caught:
        if way == "convert":
            torch_ckpt.convert(path, tmp_path / "out", "hf", dtype="bf16")
        elif way == "mapped":
            torch_ckpt.load(target, path, tensor_mapping=[("m.weight", "w")])
        elif way == "load":
            torch_ckpt.load(target, path)
        else:
            torch_ckpt.load(target, storage_reader=reader)
    assert caught.value.tensor == "m.weight"
    assert not next(iter(target.values())).any()
    head = {"head.weight": torch.zeros(2, 2)}
    torch_ckpt.load(head, path)
    assert head["head.weight"].all()


def test_a_reader_of_requests_makes_no_numbers(tmp_path: Path) -> None:
    class Requests(torch_ckpt.QuantizedHuggingFaceStorageReader):
        def _process_read_request(self, *args: Any) -> Any:
            return super()._process_read_request(*args)

    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(3))[
        "float8_e4m3fn float32 m.weight_scale_inv"
    ]
    path = scaled_bases.base(tmp_path / "base", stored)
    target = {"m.weight": torch.zeros(whole.shape)}
    with pytest.raises(torch_ckpt.UnsupportedError, match="_process_read_request"):
        torch_ckpt.load(target, storage_reader=Requests(str(path)))
    assert not target["m.weight"].any()


@pytest.mark.parametrize("scales", [True, False])
def test_float8_of_other_kinds(tmp_path: Path, scales: bool) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fnuz)
    stored = {"m.weight": codes} | ({"m.weight_scale": torch.ones(1)} if scales else {})
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config={"quant_method": "fp8"})
    model = torch.nn.Module()
    model.m = torch.nn.Linear(4, 4, bias=False)
    kind = torch_ckpt.UnsupportedError if scales else torch_ckpt.IncompleteError
    with pytest.raises(kind) as caught:
        torch_ckpt.load_model(model, path)
    assert caught.value.tensor == "m.weight"


def test_scales_of_activations_are_no_orphans(tmp_path: Path) -> None:
    kinds = scaled_bases.kinds(torch.Generator().manual_seed(3))
    stored, whole = kinds["float8_e4m3fn float32 m.weight_scale_inv"]
    stored = stored | {"m.input_scale_inv": torch.ones(1)}
    path = scaled_bases.base(tmp_path / "base", stored, quantization_config={"quant_method": "fp8"})
    model = torch.nn.Module()
    model.m = torch.nn.Linear(whole.shape[1], whole.shape[0], bias=False)
    torch_ckpt.load_model(model, path)
    assert torch.equal(model.m.weight, whole)


def test_codes_that_are_given_the_name_of_their_numbers(tmp_path: Path) -> None:
    stored, _ = scaled_bases.kinds(torch.Generator().manual_seed(3))["mxfp4"]
    path = scaled_bases.base(tmp_path / "base", stored)
    target = {"m": torch.zeros_like(stored["m_blocks"])}
    torch_ckpt.load(target, path, key_mapping=[("_blocks$", "")])
    assert torch.equal(target["m"], stored["m_blocks"])


def test_under_other_names(tmp_path: Path) -> None:
    """The names that count are the checkpoint's."""
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    target = {"mlp": torch.zeros(4, 4)}
    torch_ckpt.load(target, path, key_mapping=[(r"layer\.weight$", "mlp")])
    assert target["mlp"].eq(0.5).all()


def test_what_is_loaded_as_before(tmp_path: Path) -> None:
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    target = {
        "layer.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "layer.weight_scale_inv": torch.zeros(1, 1, dtype=torch.float64),
        "head.weight": torch.zeros(2, 2),
    }
    torch_ckpt.load(target, path)
    assert target["layer.weight"].float().eq(1).all() and target["head.weight"].eq(1).all()
    assert target["layer.weight_scale_inv"].item() == 0.5


def test_scales_in_float8_are_no_codes(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.ones(4).to(torch.float8_e8m0fnu),
        "weight_scale": torch.ones(1),
    }
    torch_ckpt.save(tensors, tmp_path / "c")
    target = {"weight": torch.zeros(4)}
    torch_ckpt.load(target, tmp_path / "c")
    assert target["weight"].eq(1).all()
