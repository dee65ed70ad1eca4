"""Weights that are codes and scales, as people publish them, and the numbers that they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def float8(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any codes but NaN and infinite ones."""
    codes = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)
    codes = torch.where(codes.view(dtype).float().isfinite(), codes, torch.zeros_like(codes))
    return codes.view(dtype)


def scales(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Scales of common sizes; of uint8 and E8M0 powers of two."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        powers = torch.randint(115, 135, tuple(shape), dtype=torch.uint8, generator=generator)
        return powers if dtype is torch.uint8 else powers.view(dtype)
    return (torch.rand(tuple(shape), generator=generator) + 0.01).to(dtype)


def packed(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Bytes of two FP4 codes."""
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)


def _float_scale(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.exp2(scale.view(torch.uint8).float() - 127)
    return scale.float()


def numbers(codes: torch.Tensor, scale: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Codes of any float dtype, each times its scale, in float32. blocks: of the last dimensions
    of codes that share one; scales has as many dimensions as codes."""
    values, grid = codes.float(), _float_scale(scale)
    for back, block in enumerate(reversed(blocks), 1):
        dim = values.dim() - back
        grid = grid.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
    return values * grid


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """FP4 codes, the low half of a byte first, as float32: twice as many in the last dimension."""
    low, high = E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]
    return torch.stack([low, high], -1).flatten(-2)


def base(path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A directory of these tensors in one file, and a configuration."""
    path.mkdir()
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(config))
    return path


def kinds(generator: torch.Generator) -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """By kind, what is stored under `m.weight` (or `m`), and the numbers."""
    found: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}
    rows, columns = 300, 260
    for dtype in FLOAT8:
        codes = float8((rows, columns), dtype, generator)
        experts = float8((3, rows, columns), dtype, generator)
        for kind in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
            grid = scales((3, 3), kind, generator)
            name = f"{str(dtype)[6:]} {str(kind)[6:]}"
            whole = numbers(codes, grid, (128, 128))
            for spelling in (
                "m.weight_scale_inv",
                "m.weight_scale",
                "m.scale",
                "m.qscale_weight",
            ):
                found[f"{name} {spelling}"] = {"m.weight": codes, spelling: grid}, whole
            grids = scales((3, 3, 3), kind, generator)
            found[f"{name} experts"] = (
                {"m": experts, "m_scale_inv": grids},
                numbers(experts, grids, (128, 128)),
            )
            mx = scales((rows, math.ceil(columns / 32)), torch.float8_e8m0fnu, generator)
            stored = mx if kind is torch.float8_e8m0fnu else mx.view(torch.uint8)
            found[f"{name} mx"] = (
                {"m.weight": codes, "m.weight_scale": stored},
                numbers(codes, mx, (1, 32)),
            )
            if kind is torch.float8_e8m0fnu:
                continue
            for shape in ((), (1,), (1, 1)):
                one = scales(shape, kind, generator)
                found[f"{name} one {shape}"] = (
                    {"m.weight": codes, "m.weight_scale_inv": one},
                    codes.float() * one.float().reshape(()),
                )
            for shape in ((rows, 1), (rows,)):
                each = scales(shape, kind, generator)
                found[f"{name} rows {shape}"] = (
                    {"m.weight": codes, "m.weight_scale": each},
                    codes.float() * each.float().reshape(rows, 1),
                )
    blocks = packed((3, 50, 9, 16), generator)
    powers = scales((3, 50, 9), torch.uint8, generator)
    found["mxfp4"] = (
        {"m_blocks": blocks, "m_scales": powers},
        numbers(unpacked(blocks.flatten(-2)), powers, (1, 32)),
    )
    codes = packed((70, 128), generator)
    powers = scales((70, 8), torch.float8_e8m0fnu, generator)
    for stored in (codes, codes.view(torch.int8)):
        found[f"fp4 in {stored.dtype}"] = (
            {"m.weight": stored, "m.scale": powers},
            numbers(unpacked(codes), powers, (1, 32)),
        )
    return found
