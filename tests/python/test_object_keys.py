"""Leaves that are no tensors through a whole save and load: of every type, and as keys."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import io
import math
import pathlib
import uuid
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sample_states import FAILED, load, save
from test_objects import EXAMPLES, same

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


# No two are equal: 1 == True and (2,) == torch.Size([2]) would be one key.
KEYS: list[Any] = [
    None,
    True,
    7,
    -(2**200),
    0.5,
    math.inf,
    math.nan,
    1.5 - 2.5j,
    "text",
    "",
    "\ud800",
    b"\x00\xff",
    (1, ("a", None)),
    Point(3, 4),
    torch.Size([5, 6]),
    torch.bfloat16,
    torch.device("cuda", 1),
    Colour.RED,
    frozenset({"b", 8}),
    range(0, 10, 3),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.timedelta(days=1, microseconds=7),
    decimal.Decimal("1.10"),
    pathlib.PurePosixPath("a/b"),
    uuid.UUID(int=9),
    numpy.float32(2.5),
]
PLANNERS: dict[str, Any] = {
    "stock": (None, None),
    "ours": (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner),
}


def round_trip(path: Path, state: dict[str, Any], planner: str) -> dict[str, Any]:
    planners = [kind and kind() for kind in PLANNERS[planner]]
    save(state, HuggingFaceStorageWriter(path), planner=planners[0])
    target: dict[str, Any] = dict.fromkeys(state)
    load(target, HuggingFaceStorageReader(path), planner=planners[1])
    return target


def stock_can_be_given(obj: Any) -> bool:
    """Its planners take a pickle, which some types of torch and numpy have none of, and a large
    Fraction of Python 3.10."""
    data = io.BytesIO()
    try:
        torch.save(obj, data)
    except (TypeError, ValueError):
        return False
    data.seek(0)
    return bool(same(obj, torch.load(data, weights_only=False)))


@pytest.mark.parametrize("planner", PLANNERS)
def test_objects_of_every_type(tmp_path: Path, planner: str) -> None:
    """In a tuple, which no planner opens."""
    objects = EXAMPLES if planner == "ours" else filter(stock_can_be_given, EXAMPLES)
    state = {f"o{n}": (obj,) for n, obj in enumerate(objects)}
    assert len(state) > 100
    state |= {"nested": [[1, [2, (3, None)]], []], "step": 7, "many bytes": b"ab" * 500_000}
    got = round_trip(tmp_path / "c", state, planner)
    for name, value in state.items():
        assert same(got[name], value), name


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


@pytest.mark.parametrize("planner", PLANNERS)
def test_keys_of_every_type(tmp_path: Path, planner: str) -> None:
    """Inside a tuple, which no planner opens; of a dict outside stock makes keys text."""
    keys = {key: number for number, key in enumerate(KEYS)}
    assert len(keys) == len(KEYS)
    state = {"all": (keys,), **{f"key{n}": ({key: n},) for n, key in enumerate(KEYS)}}
    got = round_trip(tmp_path / "c", state, planner)
    for name, value in state.items():
        assert same(got[name], value), name


def test_keys_of_dicts_that_our_planner_opens(tmp_path: Path) -> None:
    """They are parts of the names of leaves, and come back through the structure."""
    plain = {
        type(None),
        bool,
        int,
        float,
        complex,
        bytes,
        tuple,
        torch.Size,
        torch.dtype,
        torch.device,
    }
    kept = {key: n for n, key in enumerate(KEYS) if type(key) in plain}
    assert {type(key) for key in kept} == plain
    # A class that is not imported when they are read must not cost the whole checkpoint.
    texts = {Colour.RED: 1, Point(3, 4): 2}
    state = {"kept": kept, "texts": texts, "": {"": 3, "text": 4}}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    target: dict[str, Any] = {}
    planner = torch_ckpt.LoadPlanner(rebuild=True)
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert same(target, {**state, "texts": {str(key): n for key, n in texts.items()}})
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="not UTF-8"):
        torch_ckpt.save({"a": {"\ud800": 1}}, checkpoint_id=tmp_path / "d", no_dist=True)
