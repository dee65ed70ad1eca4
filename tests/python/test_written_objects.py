"""Leaves that are no tensors through a whole save and load, by stock's planners and ours."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sample_states import FAILED, load, sample, save

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


OBJECTS: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, -(2**200)],
    "floats": [0.1, -0.0, 1e308, 5e-324, float("inf"), float("-inf")],
    "complex": 1.5 - 2.5j,
    "strings": ["", "héé", '\x00\n"', "\ud800", "𝄞"],
    "bytes": b"\x00\xff" * 10,
    "many bytes": bytes(range(256)) * 5000,
    "bytearray": bytearray(b"abc"),
    "nested": [[1, [2, (3, None)]], []],
    "tuple": (1, "a", (2.0,)),
    "named tuple": Point(1, (2, 3)),
    "range": range(0, 10, 3),
    "slice": slice(1, None, 2),
    "sets": [{1, 2}, frozenset({"a"}), set()],
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "enum": Colour.RED,
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2024, 2, 29),
    "delta": datetime.timedelta(days=1, microseconds=7),
    "numpy scalar": numpy.float32(1.5),
    "numpy int": numpy.int64(-3),
}


def same_object(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, io.BytesIO):
        assert got.getvalue() == wanted.getvalue()
    elif isinstance(wanted, numpy.ndarray):
        assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()
        assert got.shape == wanted.shape
    elif isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            same_object(a, b)
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    elif isinstance(wanted, float):
        assert repr(got) == repr(wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("planner", ["stock", "ours"])
def test_objects_of_every_type(tmp_path: Path, planner: str) -> None:
    state = {
        **OBJECTS,
        "nan": float("nan"),
        "bytes io": io.BytesIO(b"content"),
        "array": numpy.arange(6, dtype=numpy.uint16).reshape(2, 3),
        "bool array": numpy.array([True, False]),
        "tensors in a tuple": (torch.arange(3), (sample(torch.bfloat16, 2, 2), 5)),
    }
    makes = {"stock": (None, None), "ours": (torch_ckpt.SavePlanner(), torch_ckpt.LoadPlanner())}
    save_planner, load_planner = makes[planner]
    save(
        state, HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True), planner=save_planner
    )
    target = dict.fromkeys(state)
    load(target, HuggingFaceStorageReader(tmp_path / "c"), planner=load_planner)
    for name, value in state.items():
        same_object(target[name], value)


def test_containers_with_our_planners(tmp_path: Path) -> None:
    """What stock's flattening destroys is kept by ours (DESIGN 7)."""
    state = {
        "int keys": {1: "a", (2, 3): {"b": 1}},
        "empty": {},
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "counter": Counter("aab"),
        "default": defaultdict(int, x=1),
    }
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    target: dict[str, Any] = {}
    planner = torch_ckpt.LoadPlanner(rebuild=True)
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert torch.equal(target["ordered"].pop("a"), torch.ones(2))
    assert list(target["ordered"]) == ["b"] and type(target["ordered"]) is OrderedDict
    assert target["int keys"] == state["int keys"] and target["empty"] == {}
    assert target["counter"] == state["counter"] and type(target["counter"]) is Counter
    assert target["default"]["missing"] == 0


@dataclasses.dataclass
class Config:
    value: int = 1


def test_an_object_that_cannot_be_said_is_refused_with_its_path(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "deep": {"config": [1, {"a": Config()}]}}
    with pytest.raises(FAILED, match="deep.config"):
        save(state, HuggingFaceStorageWriter(tmp_path / "c"))
    save(state, HuggingFaceStorageWriter(tmp_path / "c", allow_pickle=True))
    target = {"w": torch.zeros(1), "deep": {"config": [0, {"a": None}]}}
    with pytest.raises(FAILED, match="pickle"):
        load(target, HuggingFaceStorageReader(tmp_path / "c"))
    load(target, HuggingFaceStorageReader(tmp_path / "c", allow_pickle=True))
    assert target["deep"]["config"][1]["a"] == Config()
