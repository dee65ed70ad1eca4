"""Object leaves as typed JSON that nobody of ours has written."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ckpt.errors import CorruptError
from torch_ckpt.objects import (
    CorruptObjectError,
    ObjectError,
    UnsupportedObjectError,
    decode_object,
    loads_objects,
)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "reduce", "v": ["os.system", ["true"]]},
        {"$": 1},
        {"$": ["tuple"]},
        {"$": "tuple"},
        {"$": "tuple", "v": [], "w": 1},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "int", "v": "12"},
        {"$": "int", "v": 12},
        {"$": "float", "v": "1.0"},
        {"$": "float", "v": []},
        {"$": "str", "v": "zz"},
        "\ud800",
        {"\ud800": 1},
        {"$": "complex", "v": [1, 2]},
        {"$": "bytes", "b": "?"},
        {"$": "bytes", "b": "é"},
        {"$": "bytes", "b": "AA", "at": [0, 0]},
        {"$": "bytes"},
        {"$": "bytes", "at": [0, 1]},
        {"$": "bytes", "at": [-1, 1]},
        {"$": "bytes", "at": [0, -1]},
        {"$": "bytes", "at": [2**80, 2**80]},
        {"$": "bytesio", "p": -1, "b": ""},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[1, 2], [True, 3]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "set", "v": [[1]]},
        {"$": "set", "v": [1, 1.0]},
        {"$": "deque", "m": 1, "v": [1, 2]},
        {"$": "deque", "m": -1, "v": []},
        {"$": "defaultdict", "f": "eval", "v": []},
        {"$": "defaultdict", "f": [], "v": []},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "slice", "v": [1]},
        {"$": "size", "v": [1.5]},
        {"$": "namedtuple", "c": "a:b", "f": ["class"], "v": [1]},
        {"$": "namedtuple", "c": "a:b(x", "f": ["a"], "v": [1]},
        {"$": "namedtuple", "c": "a:b", "f": ["a", "a"], "v": [1, 2]},
        {"$": "namedtuple", "c": "a:b", "f": ["a"], "v": []},
        {"$": "dtype", "v": "load"},
        {"$": "device", "v": "nowhere:99999999999"},
        {"$": "generator", "d": "cpu", "b": "AAAA"},
        {"$": "generator", "d": "cpu"},
        {"$": "path", "t": "Template", "v": ""},
        {"$": "date", "v": [2023, 2, 29]},
        {"$": "datetime", "v": [1, 1, 1, 0, 0, 0, 0, 2], "tz": None},
        {"$": "time", "v": [1, 1, 1, 0, 0], "tz": {"offset": 10**20, "name": None}},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "uuid", "v": "x"},
        {"$": "decimal", "v": "x"},
        {"$": "fraction", "v": [1, 0]},
        {"$": "tensor", "t": "float32", "s": [2], "g": False, "b": "AAAA"},
        {"$": "tensor", "t": "float32", "s": [2**62, 0], "g": 1, "b": ""},
        {"$": "tensor", "t": "float32", "s": [2**62, 2**62], "g": False, "b": "AAAA"},
        {"$": "tensor", "t": "float32", "s": [-1, -1], "g": False, "b": "AAAAAA=="},
        {"$": "tensor", "t": "int8", "s": [4], "g": True, "b": "AAAAAA=="},
        {"$": "tensor", "t": "nn", "s": [], "g": False, "b": ""},
        {"$": "ndarray", "t": "|O8", "s": [1], "o": "C", "b": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "<f4", "s": [1], "o": "K", "b": "AAAAAA=="},
        {"$": "ndarray", "t": "<f4,<f4", "s": [1], "o": "C", "b": "AAAAAAAAAAA="},
        {"$": "npscalar", "t": "<f8", "b": "AAAA"},
        1e999,
        b"raw",
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else repr(value),
)
def test_malformed_objects_are_named_as_such(value):
    with pytest.raises(CorruptObjectError, match=r"^model\.step\.0\.a.*: malformed object"):
        decode_object([{"a": value}], "model.step")


def test_side_bytes_cannot_be_multiplied():
    many = [{"$": "bytes", "at": [0, 1000]}] * 2
    with pytest.raises(CorruptError, match="more than once"):
        decode_object(many, "x", side=b"\0" * 1000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        '{"format_version":1}',
        '{"format_version":true,"file_id":"","side_bytes":0,"objects":{}}',
        '{"format_version":1,"file_id":"","side_bytes":-1,"objects":{}}',
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":[]}',
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{},"more":1}',
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{"a":1,"a":2}}',
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{"a":NaN}}',
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{"a":' + "9" * 5000 + "}}",
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{"a":'
        + "[" * 99999
        + "]" * 99999
        + "}}",
        '{"format_version":1,"file_id":"","side_bytes":0,"objects":{"a":'
        + "[" * 101
        + "]" * 101
        + "}}",
        b"\xff\xfe\x00",
    ],
    ids=range(15),
)
def test_malformed_files_are_named_as_such(text):
    with pytest.raises(CorruptObjectError):
        loads_objects(text)


def test_a_newer_version_is_refused_by_word():
    with pytest.raises(UnsupportedObjectError, match="version 2"):
        loads_objects('{"format_version":2,"anything":1}')


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["$", "v", "b", "t", "s", "f", "c", "at", "p", "m", "o", "g", "n"]),
                inner,
            )
            | st.builds(
                lambda tag, v: {"$": tag, "v": v},
                st.sampled_from(
                    "int str tuple dict set odict size range slice time date fraction decimal".split()
                ),
                inner,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_gives_an_object_or_an_object_error(value):
    try:
        decode_object(value, "x")
    except ObjectError:
        pass
