"""What the core computes of stored values, against torch and Python's own numbers."""

from __future__ import annotations

import json
import math
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from foreign_samples import of_dcp, of_ours, of_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ckpt
from torch_ckpt.checkpoint.values import compare
from torch_ckpt.cli import cli
from torch_ckpt.dcp.read import read_objects
from torch_ckpt.native.dtypes import DTYPE_NAMES
from torch_ckpt.native.opened import OpenedCheckpoint

DTYPES = [dtype for dtype in DTYPE_NAMES if "float4" not in str(dtype)]


def wide(value: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_complex:
        return value.to(torch.complex128)
    if value.dtype.itemsize == 1 and value.dtype.is_floating_point:
        value = value.to(torch.float32)
    return value.to(torch.float64)


def numbers(value: torch.Tensor) -> list[Any]:
    """Integers exactly."""
    floating = value.dtype.is_complex or value.dtype.is_floating_point
    return (wide(value) if floating else value).tolist()  # type: ignore[no-any-return]


def apart(x: Any, y: Any) -> float:
    if x == y or (x != x and y != y):
        return 0.0
    return float(abs(x - y))


def expected(
    left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float
) -> tuple[int, float]:
    """By torch.isclose where it computes in float64, else by Python."""
    floating = [x.dtype.is_complex or x.dtype.is_floating_point for x in (left, right)]
    mixed = (left.dtype == torch.uint64) != (right.dtype == torch.uint64)
    if any(floating) or mixed:
        x, y = wide(left), wide(right)
        if x.dtype != y.dtype:
            x, y = x.to(torch.complex128), y.to(torch.complex128)
        count = int((~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)).sum())
        pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    else:
        pairs = list(zip(map(int, numbers(left)), map(int, numbers(right)), strict=True))
        count = sum(x != y and float(abs(x - y)) > atol + rtol * abs(float(y)) for x, y in pairs)
    if left.dtype == right.dtype and not rtol and not atol:
        size = left.dtype.itemsize
        bits = [each.view(torch.uint8).view(-1, size) for each in (left, right)]
        count = int((bits[0] != bits[1]).any(dim=1).sum())
    all_apart = [apart(x, y) for x, y in pairs]
    largest = math.nan if any(map(math.isnan, all_apart)) else max(all_apart, default=0.0)
    return count, largest


def random_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """All bits there are; often small numbers, so that some are equal."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if seed % 2:
        small = torch.randint(0, 4, (count,), generator=generator)
        return small.to(torch.float32).to(dtype) if dtype.is_floating_point else small.to(dtype)
    return torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator
    ).view(dtype)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_differences_are_those_of_torch(tmp_path: Path, data: st.DataObject) -> None:
    dtypes = data.draw(
        st.sampled_from([(d, d) for d in DTYPES] + [(d, e) for d in DTYPES for e in DTYPES])
    )
    count = data.draw(st.sampled_from([0, 1, 7, 1500]))
    seeds = data.draw(st.tuples(st.integers(0, 50), st.integers(0, 50)))
    left, right = (random_bits(d, count, seed) for d, seed in zip(dtypes, seeds, strict=True))
    rtol, atol = data.draw(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (0.5, 0.0), (1e-3, 1e-6)]))
    if dtypes[0] == dtypes[1] and data.draw(st.booleans()):
        right[: count // 2] = left[: count // 2]
    a = OpenedCheckpoint(str(of_torch(tmp_path / "a.pt", {"x": left})))
    b = OpenedCheckpoint(str(of_torch(tmp_path / "b.pt", {"x": right})))
    ((number, largest),) = compare(a, b, ["x"], rtol=rtol, atol=atol)
    wanted, by = expected(left, right, rtol, atol)
    assert number == wanted
    assert largest == pytest.approx(by, rel=1e-15, abs=0, nan_ok=True)


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(dtype=st.sampled_from(DTYPES), count=st.sampled_from([0, 1, 3000]), seed=st.integers(0, 50))
def test_statistics_are_those_of_torch(
    tmp_path: Path, dtype: torch.dtype, count: int, seed: int
) -> None:
    value = random_bits(dtype, count, seed)
    path = of_torch(tmp_path / "a.pt", {"x": value})
    found = torch_ckpt.open(path)["x"].statistics()
    floating = dtype.is_floating_point or dtype.is_complex
    if floating:
        assert found["nan"] == int(torch.isnan(wide(value)).sum())
        assert found["inf"] == int(torch.isinf(wide(value)).sum())
    else:
        assert found["nan"] is found["inf"] is None
    finite = (
        [] if dtype.is_complex else [x for x in numbers(value) if not floating or math.isfinite(x)]
    )
    if not finite:
        assert found["min"] is found["max"] is found["mean"] is None
        return
    assert (found["min"], found["max"]) == (min(finite), max(finite))
    assert type(found["min"]) is (float if floating else int)
    scale = max(map(abs, finite)) or 1.0
    mean = sum(map(Fraction, finite), Fraction(0)) / len(finite)
    assert found["mean"] == pytest.approx(float(mean), rel=1e-12, abs=float(scale) * 1e-12)


def test_progress_of_statistics_ends_with_all_bytes(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "a", {"x": torch.zeros(3_000_000)})
    told: list[tuple[int, int]] = []
    torch_ckpt.open(path)["x"].statistics(lambda *done: told.append(done))
    assert told[-1] == (12_000_000, 12_000_000)


def diff(*arguments: Any) -> Any:
    done = CliRunner().invoke(cli, ["diff", *map(str, arguments), "--json"])
    assert done.exit_code in (0, 4), done.stderr
    return {each["name"]: each["what"] for each in json.loads(done.stdout)["different"]}


def test_diff_of_objects(tmp_path: Path) -> None:
    """Where texts differ, values decide; and bytes that stand in a file beside."""
    value = {
        "number": 1,
        "large": b"x" * 100_000,
        "tuple": (1, [2]),
        "nothing": None,
        "namespace": types.SimpleNamespace(a=1),
        "truth": True,
    }
    a = of_ours(tmp_path / "a", value)
    for saver in (of_ours, of_dcp, of_torch):
        assert diff(a, saver(tmp_path / saver.__name__, value)) == {}
    changed = {**value, "large": b"x" * 99_999 + b"y", "tuple": (1, [3]), "truth": 1}
    for saver in (of_ours, of_dcp, of_torch):
        told = diff(a, saver(tmp_path / f"other_{saver.__name__}", changed))
        assert set(told) == {"large", "tuple", "truth"}
        assert told["truth"] == "True and 1"
        assert told["large"].startswith("b'xxx")
    assert diff(a, of_ours(tmp_path / "none", {**value, "nothing": 0})) == {"nothing": "None and 0"}


def test_diff_of_texts_and_of_leaves_that_cannot_be_read(tmp_path: Path) -> None:
    value = {"at": "at", "list": ["at"], "long": "y" * 100 + "a"}
    a = of_torch(tmp_path / "a.pt", value)
    assert diff(a, a) == {} and diff(a, of_ours(tmp_path / "b", value)) == {}
    told = diff(a, of_torch(tmp_path / "c.pt", {**value, "at": "to", "long": "y" * 100 + "b"}))
    assert told["at"] == "'at' and 'to'"
    assert told["long"].endswith("..., which differ from character 102 on")
    opaque = of_torch(tmp_path / "d.pt", {**value, "object": Opaque(), "x": torch.ones(2)})
    other = of_torch(tmp_path / "e.pt", {**value, "object": Opaque(), "x": torch.zeros(2)})
    told = diff(opaque, other)
    assert told["x"] == "2 of 2 values differ, by 1 at most"
    assert told["object"].startswith("cannot be compared: ") and "Opaque" in told["object"]


class Opaque:
    pass


def test_objects_of_one_file_are_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_ours(tmp_path / "a", {f"leaf{number}": (number,) for number in range(50)})
    reads = []
    read = read_objects.ObjectReader._read_file
    monkeypatch.setattr(
        read_objects.ObjectReader,
        "_read_file",
        lambda self, name: reads.append(name) or read(self, name),
    )
    opened = torch_ckpt.open(path)
    assert [opened.objects[f"leaf{number}"] for number in range(50)] == [(n,) for n in range(50)]
    assert len(reads) == 1
