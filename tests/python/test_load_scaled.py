"""float8 codes that mean a number only together with their scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sample_states import FAILED

import torch_ckpt

CODES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


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


@pytest.mark.parametrize("dtype", CODES, ids=str)
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


def test_the_error_is_our_own(tmp_path: Path) -> None:
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    with pytest.raises(torch_ckpt.UnsupportedError):
        torch_ckpt.load({"layer.weight": torch.zeros(4, 4)}, path)


def test_under_other_names(tmp_path: Path) -> None:
    """The names that count are the checkpoint's."""
    path = hub(tmp_path / "in", torch.float8_e4m3fn, "weight_scale_inv")
    with pytest.raises(FAILED, match=r"layer\.weight_scale_inv"):
        torch_ckpt.load({"mlp": torch.zeros(4, 4)}, path, key_mapping=[(r"layer\.weight$", "mlp")])


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
