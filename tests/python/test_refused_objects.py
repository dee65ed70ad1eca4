"""The error for an object that is not written says how to make it plain data."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
from typing import Any

import pytest

from torch_ckpt.objects import CorruptObjectError, decode_object, encode_object
from torch_ckpt.objects.types import UnsupportedObjectError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Options:
    rate: float = 0.1


class Other:
    pass


class Arguments(argparse.Namespace):
    pass


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (
            Options(),
            "convert it with dataclasses.asdict(...); torch_ckpt.save and its writers store a pickle with allow_pickle=True",
        ),
        (
            Arguments(rate=0.1),
            "convert it with vars(...); torch_ckpt.save and its writers store a pickle with allow_pickle=True",
        ),
        (
            Other(),
            "convert it to plain Python data; torch_ckpt.save and its writers store a pickle with allow_pickle=True",
        ),
        (
            Options,
            "convert it to plain Python data; torch_ckpt.save and its writers store a pickle with allow_pickle=True",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_advice(value: Any, advice: str) -> None:
    with pytest.raises(UnsupportedObjectError) as caught:
        encode_object({"deep": [value]}, "config")
    said = str(caught.value)
    assert said.startswith("config.deep.0: objects of type ") and advice in said, said
    if "dataclasses" in advice:
        assert encode_object(dataclasses.asdict(value)) == {"rate": 0.1}
    elif "vars" in advice:
        assert encode_object(vars(value)) == {"rate": 0.1}


def test_an_object_that_is_not_read_is_named_by_its_path() -> None:
    value = {"args": argparse.Namespace(x=[1, {"color": Color.RED}], y=2), (1, 2): {Color.BLUE: 1}}
    encoded = json.loads(json.dumps(encode_object([value])))
    assert decode_object(encoded, "c") == [value]
    lost = json.loads(json.dumps(encoded).replace("RED", "GREEN"))
    with pytest.raises(UnsupportedObjectError, match=r"^c\.0\.args\.x\.1\.color: .* no member"):
        decode_object(lost, "c")
    lost = json.loads(json.dumps(encoded).replace("BLUE", "GREEN"))
    with pytest.raises(UnsupportedObjectError, match=r"^c\.0\.\(tuple\)\.\(a key\): .* no member"):
        decode_object(lost, "c")
    for damaged, path in (
        ([[1, {"$": "tuple", "v": [2, {"$": "none"}]}]], "c.0.1.1"),
        ({"a": {"$": "set", "v": [1, {"$": "deque", "m": None, "v": [1, 10**30]}]}}, "c.a.1.1"),
        ([1, [2], {"$": "odict", "v": [["k", 1], ["l", 10**30]]}], "c.2.l"),
    ):
        with pytest.raises(CorruptObjectError, match=f"^{re.escape(path)}: malformed"):
            decode_object(damaged, "c")
