"""Loads into targets of another dtype."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_states import (
    FAILED,
    bits,
    load,
    load_ours,
    sample,
    save,
)
from torch.distributed.checkpoint.planner import LoadPlan

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.native.dtypes import TORCH_DTYPES


def saved(path: Path, state: dict[str, Any]) -> Path:
    save(state, HuggingFaceStorageWriter(path, save_distributed=True))
    return path


WIDENING = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.int8, torch.int64),
    (torch.uint8, torch.int16),
    (torch.int16, torch.float32),
    (torch.bool, torch.uint8),
    (torch.bool, torch.float32),
    (torch.float32, torch.complex64),
]
ROUNDING = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float8_e4m3fn),
    (torch.int64, torch.float32),
    (torch.int64, torch.int8),
    (torch.int32, torch.uint8),
]


def value_of(dtype: torch.dtype) -> torch.Tensor:
    """Values that every dtype of the tests above holds, or nearly."""
    return torch.tensor([0, 1, 1, 0, 1, 0]).reshape(2, 3).to(dtype)


@pytest.mark.parametrize(("source", "target"), WIDENING, ids=str)
def test_widening_is_silent(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    path = saved(tmp_path / "in", {"w": sample(source, 4, 5)})
    into = {"w": torch.zeros(4, 5, dtype=target)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is")
        load(into, HuggingFaceStorageReader(path))
    assert bits(into["w"]) == bits(sample_again(path, source).to(target))


def sample_again(path: Path, dtype: torch.dtype) -> torch.Tensor:
    return load_ours(path, {"w": torch.zeros(4, 5).to(dtype)})["w"]


@pytest.mark.parametrize(("source", "target"), ROUNDING, ids=str)
def test_other_casts_warn_once_with_the_name(
    tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    path = saved(tmp_path / "in", {"deep": {"w": value_of(source)}, "x": torch.ones(1)})
    into = {"deep": {"w": torch.zeros(2, 3).to(target)}, "x": torch.zeros(1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(into, HuggingFaceStorageReader(path))
    told = [str(warning.message) for warning in caught if "stored as" in str(warning.message)]
    assert len(told) == 1 and told[0].startswith("deep.w: stored as"), told
    assert bits(into["deep"]["w"]) == bits(value_of(source).to(target))


def test_a_cast_of_several_boxes_warns_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.arange(6.0)})

    class Halves(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            (item,) = super().create_local_plan().items
            halves = [
                dataclasses.replace(
                    item,
                    dest_offsets=torch.Size([at]),
                    storage_offsets=torch.Size([at]),
                    lengths=torch.Size([3]),
                )
                for at in (0, 3)
            ]
            return LoadPlan(halves)

    target = {"w": torch.zeros(6, dtype=torch.float16)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(target, HuggingFaceStorageReader(path), planner=Halves())
    assert [str(w.message)[:12] for w in caught if "stored as" in str(w.message)] == [
        "w: stored as"
    ]
    assert target["w"].tolist() == list(range(6))


def test_strict_dtype_refuses(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.ones(3, dtype=torch.float16)})
    for options in (
        (HuggingFaceStorageReader(path, strict_dtype=True), None),
        (HuggingFaceStorageReader(path), torch_ckpt.LoadPlanner(strict_dtype=True)),
    ):
        target = {"w": torch.zeros(3)}
        with pytest.raises(FAILED, match="'w'.*strict_dtype"):
            load(target, options[0], planner=options[1])
        assert (target["w"] == 0).all()
    target = {"w": torch.zeros(3, dtype=torch.float16)}
    load(target, HuggingFaceStorageReader(path, strict_dtype=True))
    assert (target["w"] == 1).all()


LOSSY = [
    (torch.tensor([1.0, 1e39], dtype=torch.float64), torch.float32),
    (torch.tensor([1.0, 70000.0]), torch.float16),
    (torch.tensor([1.0, 500.0]), torch.float8_e4m3fn),
    (torch.tensor([1, 200]), torch.int8),
    (torch.tensor([-1, 2]), torch.uint8),
    (torch.tensor([0.5, 2.0]), torch.int32),
    (torch.tensor([float("nan"), 2.0]), torch.int32),
    (torch.tensor([2, 0]), torch.bool),
    (torch.tensor([1 + 1j, 2]), torch.float32),
]


@pytest.mark.parametrize(("value", "dtype"), LOSSY, ids=str)
def test_casts_that_change_a_value_are_errors(
    tmp_path: Path, value: torch.Tensor, dtype: torch.dtype
) -> None:
    path = saved(tmp_path / "in", {"w": value})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FAILED, match="'w'"):
            load({"w": torch.zeros(2).to(dtype)}, HuggingFaceStorageReader(path))


def test_infinities_and_nans_that_were_there_are_no_loss(tmp_path: Path) -> None:
    value = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    path = saved(tmp_path / "in", {"w": value})
    target = {"w": torch.zeros(4, dtype=torch.float16)}
    with pytest.warns(UserWarning, match="w: stored as"):
        load(target, HuggingFaceStorageReader(path))
    assert torch.equal(target["w"].isnan(), value.isnan())
    assert torch.equal(target["w"][:2], value[:2].half())


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([65504.0, -65504.0], True),  # the largest of float16
        ([65519.0], True),  # rounded down to it
        ([65520.0], False),  # to infinity
        ([-65520.0, 1.0], False),
        ([math.inf, 65504.0], True),  # is infinite already
        ([math.nan, 65520.0], False),
        ([], True),
    ],
)
def test_the_largest_value_that_a_cast_keeps(
    tmp_path: Path, values: list[float], fits: bool
) -> None:
    save({"w": torch.tensor(values)}, HuggingFaceStorageWriter(tmp_path / "c"))
    target = {"w": torch.zeros(len(values), dtype=torch.float16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fits:
            load(target, HuggingFaceStorageReader(tmp_path / "c"))
            assert torch.equal(target["w"], torch.tensor(values).half())
        else:
            with pytest.raises(FAILED, match="'w': .*out of range"):
                load(target, HuggingFaceStorageReader(tmp_path / "c"))


@pytest.mark.parametrize("source", [torch.uint16, torch.uint32, torch.uint64, torch.int64])
def test_integers_into_float8(tmp_path: Path, source: torch.dtype) -> None:
    save({"w": torch.tensor([0, 7, 16], dtype=source)}, HuggingFaceStorageWriter(tmp_path / "c"))
    target = {"w": torch.zeros(3).to(torch.float8_e4m3fn)}
    with pytest.warns(UserWarning, match="w: stored as"):
        load(target, HuggingFaceStorageReader(tmp_path / "c"))
    assert target["w"].float().tolist() == [0, 7, 16]
    largest = torch.tensor([torch.iinfo(source).min or 1000], dtype=source)
    save({"w": largest}, HuggingFaceStorageWriter(tmp_path / "c"))
    with pytest.warns(UserWarning), pytest.raises(FAILED, match="'w': .*out of range"):
        load(
            {"w": torch.zeros(1).to(torch.float8_e4m3fn)}, HuggingFaceStorageReader(tmp_path / "c")
        )


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([False, True]), torch.float8_e8m0fnu),
        (torch.tensor([-4.0, 4.0]), torch.float8_e8m0fnu),
        (torch.tensor([0.0, 4.0]), torch.float8_e8m0fnu),
        (torch.tensor([math.inf]), torch.float8_e8m0fnu),
        (torch.tensor([math.inf]), torch.float8_e4m3fn),
        (torch.tensor([-math.inf]), torch.float8_e4m3fnuz),
    ],
    ids=str,
)
def test_casts_to_float8_that_change_a_value(
    tmp_path: Path, values: torch.Tensor, dtype: torch.dtype
) -> None:
    save({"w": values}, HuggingFaceStorageWriter(tmp_path / "c"))
    target = {"w": torch.ones(values.shape).to(dtype)}
    with pytest.warns(UserWarning, match="w: stored as"), pytest.raises(FAILED, match="'w': "):
        load(target, HuggingFaceStorageReader(tmp_path / "c"))


def test_casts_to_float8_that_keep_every_value(tmp_path: Path) -> None:
    none = torch.zeros(5, 0, dtype=torch.float64)
    state = {"w": torch.tensor([0.5, 4.0, math.nan]), "none": none}
    save(state, HuggingFaceStorageWriter(tmp_path / "c"))
    target = {"w": torch.ones(3).to(torch.float8_e8m0fnu), "none": torch.zeros(1, 0).expand(5, 0)}
    with pytest.warns(UserWarning, match="w: stored as"):
        load(target, HuggingFaceStorageReader(tmp_path / "c"))
    assert target["w"].float()[:2].tolist() == [0.5, 4.0] and target["w"].float()[2].isnan()


FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def write_at(path: Path, value: torch.Tensor, odd: int) -> None:
    """A safetensors file whose data begins `odd` bytes after a multiple of 8."""
    name = next(key for key, dtype in TORCH_DTYPES.items() if dtype == value.dtype)
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    fields = {"dtype": name, "shape": list(value.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"w": fields}).encode()
    header += b" " * ((odd - len(header)) % 8)
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


@settings(max_examples=60)
@given(
    source=st.sampled_from(FLOATS),
    target=st.sampled_from(FLOATS),
    rows=st.integers(0, 40),
    columns=st.sampled_from([1, 7, 4099, 70_001]),
    odd=st.integers(0, 7),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_casts_are_those_of_torch_wherever_elements_lie(
    tmp_path_factory: pytest.TempPathFactory,
    source: torch.dtype,
    target: torch.dtype,
    rows: int,
    columns: int,
    odd: int,
    strided: bool,
    seed: int,
) -> None:
    """Odd offsets have elements that steps, segments and cells of a read cut in two."""
    path = tmp_path_factory.mktemp("odd")
    random = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, columns, generator=random).mul(8).to(source)
    write_at(path, value, odd)
    into = (
        torch.zeros(columns, rows, dtype=target).t()
        if strided
        else value.new_zeros(rows, columns, dtype=target)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"w": into}, HuggingFaceStorageReader(path))
    assert bits(into.contiguous()) == bits(value.to(target))


def test_what_a_cast_would_lose_is_counted(tmp_path: Path) -> None:
    value = torch.zeros(3_000_001, dtype=torch.float64)
    value[[0, 1_000_000, 3_000_000]] = torch.tensor([1e300, -1e6, math.inf], dtype=torch.float64)
    write_at(tmp_path / "c", value, 3)
    for dtype, lost in ((torch.float16, 2), (torch.float32, 1), (torch.float8_e4m3fn, 3)):
        target = {"w": torch.zeros(value.shape, dtype=dtype)}
        with (
            pytest.warns(UserWarning, match="w: stored as"),
            pytest.raises(FAILED, match=f"'w': at least {lost} values of F64"),
        ):
            load(target, HuggingFaceStorageReader(tmp_path / "c"))


def test_one_warning_for_all_casts_that_lose_precision(tmp_path: Path) -> None:
    state = {f"t{i}": torch.rand(4) for i in range(9)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c")
    target = {name: torch.zeros(4, dtype=torch.bfloat16) for name in state}
    target["t8"] = torch.zeros(4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="lose precision") as caught:
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith("t0: stored as torch.float32, loaded into torch.bfloat16; t1: stored as")
    assert text.endswith("; and 3 more; values may lose precision") and "t8" not in text
