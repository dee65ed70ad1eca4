"""QuantizedHuggingFaceStorageReader, beside stock's of the same name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from sample_states import FAILED
from torch.distributed.checkpoint import quantized_hf_storage as stock

import torch_ckpt
from torch_ckpt import QuantizedHuggingFaceStorageReader as Ours

KINDS = scaled_bases.kinds(torch.Generator().manual_seed(8))
KIND = "float8_e4m3fn float32 m.weight_scale_inv"


def indexed(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As stock's reader needs it: with an index."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    names = dict.fromkeys(tensors, "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def both(path: Path, name: str, shape: torch.Size, dtype: torch.dtype) -> list[torch.Tensor]:
    """What stock's reader and ours make of it."""
    found = []
    for reader in (stock.QuantizedHuggingFaceStorageReader, Ours):
        target = {name: torch.zeros(shape, dtype=dtype)}
        dcp.load(target, storage_reader=reader(str(path), target_dtype=dtype))
        found.append(target[name])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, whole = KINDS[KIND]
    path = indexed(tmp_path / "fp8", stored)
    theirs, ours = both(path, "m.weight", whole.shape, dtype)
    assert torch.equal(ours, theirs) and torch.equal(ours, whole.to(dtype))
    stored, whole = KINDS["mxfp4"]
    path = indexed(tmp_path / "mxfp4", stored)
    theirs, ours = both(path, "m_blocks", whole.shape, dtype)
    assert torch.equal(ours, whole.to(dtype))
    # Stock takes the shape of the bytes for that of a chunk: of each row it reads as many numbers
    # as there are scales, and leaves the rest as it was.
    assert torch.equal(theirs[..., :9], ours[..., :9]) and not theirs[..., 9:].any()


def test_metadata_as_stock(tmp_path: Path) -> None:
    path = indexed(tmp_path / "base", {**KINDS[KIND][0], **KINDS["mxfp4"][0]})
    theirs = stock.QuantizedHuggingFaceStorageReader(str(path)).read_metadata()
    ours = Ours(path, target_dtype=torch.bfloat16).read_metadata()
    sizes: list[dict[str, Any]] = [
        {name: each.size for name, each in found.state_dict_metadata.items()}
        for found in (theirs, ours)
    ]
    assert sizes[0] == sizes[1]
    assert ours.state_dict_metadata["m.weight"].properties.dtype is torch.bfloat16
    assert ours.state_dict_metadata["m.weight_scale_inv"].properties.dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path: Path, kind: str) -> None:
    """Without an index, and of what stock does not know."""
    stored, whole = KINDS[kind]
    path = scaled_bases.base(tmp_path / "base", stored)
    target = {next(iter(stored)): torch.zeros(whole.shape, dtype=torch.bfloat16)}
    dcp.load(target, storage_reader=Ours(path))
    assert torch.equal(next(iter(target.values())), whole.bfloat16())


def test_scales_beside_them(tmp_path: Path) -> None:
    stored, whole = KINDS[KIND]
    path = scaled_bases.base(tmp_path / "base", stored)
    target = {"m.weight": torch.zeros(whole.shape), "m.weight_scale_inv": torch.zeros(3, 3)}
    dcp.load(target, storage_reader=Ours(path, 4))
    assert torch.equal(target["m.weight"], whole)
    assert torch.equal(target["m.weight_scale_inv"], stored["m.weight_scale_inv"])


def test_block_sizes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = scaled_bases.float8((100, 100), torch.float8_e4m3fn, generator)
    grid = scaled_bases.scales((2, 2), torch.float32, generator)
    stored = {"m.weight": codes, "m.weight_scale_inv": grid}
    whole = scaled_bases.numbers(codes, grid, (64, 64))
    said = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    path = scaled_bases.base(tmp_path / "said", stored, quantization_config=said)
    plain = scaled_bases.base(tmp_path / "plain", stored)
    for reader in (Ours(path), Ours(path, block_size=64), Ours(plain, block_size=64)):
        target = {"m.weight": torch.zeros(100, 100)}
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["m.weight"], whole)
    # 90 and 64 make as many blocks, of other rows.
    with pytest.raises(FAILED, match=r"block_size=90.*\(64, 64\)"):
        dcp.load({"m.weight": torch.zeros(100, 100)}, storage_reader=Ours(path, block_size=90))
    with pytest.raises(FAILED, match=r"m\.weight.*\(2, 2\)"):
        dcp.load({"m.weight": torch.zeros(100, 100)}, storage_reader=Ours(plain))


def test_patched(tmp_path: Path) -> None:
    stored, whole = KINDS[KIND]
    path = scaled_bases.base(tmp_path / "base", stored)  # without an index
    with torch_ckpt.patch_torch():
        reader = stock.QuantizedHuggingFaceStorageReader(str(path), 4)
        assert type(reader) is Ours and isinstance(reader, stock.QuantizedHuggingFaceStorageReader)
        target = {"m.weight": torch.zeros(whole.shape)}
        dcp.load(target, storage_reader=reader)
    assert torch.equal(target["m.weight"], whole)
    assert type(stock.QuantizedHuggingFaceStorageReader(str(path))) is not Ours


def test_scales_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, whole = KINDS[KIND]
    more = {"m.input_scale": torch.ones(1), "m.bias": torch.ones(1)}
    path = scaled_bases.base(tmp_path / "base", {**stored, **more})
    target = {"m.weight": torch.zeros(whole.shape), "m.bias": torch.zeros(1)}
    torch_ckpt.load(target, storage_reader=Ours(path))
    assert not caplog.records
