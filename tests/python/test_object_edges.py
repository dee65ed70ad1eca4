"""Objects at the edges of what typed JSON says: what is written comes back, or is not written."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from torch_ckpt.errors import CorruptError, UnsupportedError
from torch_ckpt.objects import decode_object, dumps_objects, encode_object, loads_objects
from torch_ckpt.objects.types import MAX_DEPTH


def round_trip(obj: Any, **options: Any) -> Any:
    text, side = dumps_objects({"x": obj}, file_id="0", **options)
    return loads_objects(text, b"".join(side), **options)["x"]


def nested(obj: Any, depth: int) -> Any:
    for _ in range(depth):
        obj = [obj]
    return obj


@pytest.mark.parametrize(
    "value", [1.5 - 2j, range(2, 9, 3), fractions.Fraction(2**70, 3), 5, np.float32(2)], ids=repr
)
def test_scalars_as_deep_as_containers_go(value: Any) -> None:
    found = round_trip(nested(value, MAX_DEPTH))
    for _ in range(MAX_DEPTH):
        (found,) = found
    assert found == value and type(found) is type(value)
    with pytest.raises(UnsupportedError):
        round_trip(nested(value, MAX_DEPTH + 1))


def test_tensors_of_too_many_dimensions() -> None:
    assert round_trip((torch.ones([1] * 64),))[0].dim() == 64
    with pytest.raises(UnsupportedError, match="64 dimensions"):
        round_trip((torch.ones([1] * 65),))


@pytest.mark.parametrize(
    "value",
    [
        np.bytes_(b"a\0"),
        np.bytes_(b"\0"),
        np.bytes_(b""),
        np.str_("a\0"),
        np.str_("\0\0"),
        np.str_("é"),
    ],
    ids=repr,
)
def test_numpy_text_keeps_its_end(value: Any) -> None:
    found = round_trip(value)
    assert found == value and len(found) == len(value) and type(found) is type(value)


def test_numpy_text_of_the_other_byte_order() -> None:
    value = np.array(["a\0b"], dtype=np.dtype("<U3").newbyteorder())[0]
    assert round_trip(value) == value


class Color(enum.Flag):
    RED = 1
    BLUE = 2


def test_enums_that_no_reader_finds() -> None:
    class Local(enum.Enum):
        ONE = 1

    with pytest.raises(UnsupportedError, match="no reader finds it"):
        encode_object(Local.ONE, "x")
    assert round_trip(Color.RED) is Color.RED


class Zone(datetime.tzinfo):
    """As zoneinfo.ZoneInfo, without its files."""

    def utcoffset(self, when: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=2)

    def dst(self, when: Any) -> None:
        return None


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2024, 1, 2, tzinfo=Zone()),
        datetime.time(1, 2, tzinfo=Zone()),
        Color.RED | Color.BLUE,
    ],
    ids=["datetime", "time", "flags"],
)
def test_what_only_a_pickle_says(value: Any) -> None:
    with pytest.raises(UnsupportedError):
        round_trip(value)
    text, side = dumps_objects({"x": value}, file_id="0", allow_pickle=True)
    with pytest.raises(UnsupportedError, match="allow_pickle"):
        loads_objects(text, b"".join(side))
    found = loads_objects(text, b"".join(side), allow_pickle=True)["x"]
    assert str(found) == str(value) and type(found) is type(value)


def test_named_tuples_with_renamed_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_module_that_goes")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cls = collections.namedtuple("Odd", ["a", "class"], rename=True)
    cls.__module__, cls.__qualname__ = module.__name__, "Odd"
    module.Odd = cls  # type: ignore[attr-defined]
    text, _ = dumps_objects({"x": cls(1, 2)}, file_id="0")
    assert type(loads_objects(text)["x"]) is cls
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.warns(UserWarning, match="is not imported"):
        found = loads_objects(text)["x"]
    assert found == (1, 2) and found._fields == ("a", "_1")


@pytest.mark.parametrize(
    "fields", [["\ufb01", "fi"], ["a", "a"], ["a", "class"], ["_1", "a"], ["a", "1"]], ids=repr
)
def test_named_tuples_whose_fields_are_none(fields: list[str]) -> None:
    value = {"$": "namedtuple", "c": "no.module:P", "f": fields, "v": [1, 2]}
    with pytest.raises(CorruptError):
        decode_object(value)


class Meters(np.float64):
    pass


def test_a_subclass_of_a_numpy_scalar_is_not_written_as_its_base() -> None:
    with pytest.raises(UnsupportedError, match="Meters"):
        round_trip(Meters(2))
    assert type(round_trip(np.longlong(3))) is np.longlong


asked: list[str] = []


class Recording(type):
    def __getattr__(cls, name: str) -> Any:
        asked.append(name)
        raise AttributeError(name)


class Plain(metaclass=Recording):
    pass


def test_looking_for_a_named_tuple_asks_no_class() -> None:
    asked.clear()  # of what looks at this module's names for tests
    reference = f"{Plain.__module__}:Plain"
    with pytest.warns(UserWarning, match="is not imported or has other fields"):
        found = decode_object({"$": "namedtuple", "c": reference, "f": ["a"], "v": [1]})
    assert found == (1,) and "_fields" not in asked


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**400])
def test_long_integers_stand_as_text_only(number: int) -> None:
    assert round_trip(number) == number
    text, _ = dumps_objects({"x": 1}, file_id="0")
    with pytest.raises(CorruptError):
        loads_objects(text.replace('"x":1', f'"x":{number}'))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_objects_files_are_ascii(encoding: str) -> None:
    text, _ = dumps_objects({"x": 1}, file_id="0")
    assert loads_objects(text.encode()) == {"x": 1}
    with pytest.raises(CorruptError, match="not valid JSON"):
        loads_objects(text.encode(encoding))
