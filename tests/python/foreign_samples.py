"""What tests save with other libraries, and compare with what ours reads of it."""

from __future__ import annotations

import os
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

import torch_ckpt


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "model": {
            "weight": torch.randn(37, 19, generator=generator),
            "transposed": torch.randn(8, 6, generator=generator).t(),
            "half": torch.randn(5, generator=generator).to(torch.bfloat16),
            "fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4),
            "fp8": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(3.25),
            "empty": torch.empty(0, 4),
            "unsigned": torch.arange(6).to(torch.uint16),
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "view": torch.arange(100.0)[10:20],
        },
        "step": 7,
        "rate": 1e-3,
        "name": "größe",
        "none": None,
        "betas": (0.9, 0.999),
        "groups": [{"params": [0, 1], "lr": 0.1}],
        "rng": numpy.random.default_rng(0).bit_generator.state,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        dense = [
            each.detach().clone(memory_format=torch.contiguous_format) for each in (left, right)
        ]
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(*(each.view(-1).view(torch.uint8) for each in dense))
        )
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        kinds = type(left) is type(right)
        return kinds and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e5m2]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any shape, with its dimensions in any order, and perhaps a part of a larger storage."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    larger = [size + draw(st.integers(0, 2)) for size in shape]
    count = torch.Size(larger).numel()
    values = torch.arange(count).remainder(2).to(draw(st.sampled_from(DTYPES)))
    part = values.view(larger)[tuple(slice(0, size) for size in shape)]
    return part.permute(order)


VALUES = {
    "frozen": frozenset({1, "a"}),
    "bytearray": bytearray(b"ab"),
    "empty": [b"", bytearray(), numpy.array([]), numpy.bytes_(b"")],
    "paths": [PurePosixPath("a/b"), PosixPath("//a/b"), PureWindowsPath("C:\\a")],
    "times": [numpy.datetime64("2020-01-01"), numpy.timedelta64(25, "s"), numpy.datetime64("NaT")],
    "arrays": [numpy.arange(6).reshape(2, 3, order="F"), numpy.array(["x", "yy"])],
    "sizes": [torch.Size([-1]), torch.Size(range(9))],
    "range": range(3, 9, 2),
    "many": [True] * 1_200_000,
    "dicts": tuple({} for _ in range(50_000)),
    "numbers": [-(2**63), 2**63, -(2**200), 1e22, -0.0, float("inf"), 5e-324, 1j],
}


def of_ours(path: Path, what: Any) -> Path:
    torch_ckpt.save(what, path, no_dist=True)
    return path


def of_dcp(path: Path, what: Any) -> Path:
    dcp.save(what, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def of_torch(path: Path, what: Any) -> Path:
    torch.save(what, path)
    return path


SAVERS = [of_ours, of_dcp, of_torch]
