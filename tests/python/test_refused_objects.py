"""The error for an object that is not written says how to make it plain data."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from torch_ckpt.objects import encode_object
from torch_ckpt.objects.types import UnsupportedObjectError


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
        (Options(), "convert it with dataclasses.asdict(...), or pass allow_pickle=True"),
        (Arguments(rate=0.1), "convert it with vars(...), or pass allow_pickle=True"),
        (Other(), "convert it to plain Python data, or pass allow_pickle=True"),
        (Options, "convert it to plain Python data, or pass allow_pickle=True"),
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
