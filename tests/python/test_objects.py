"""Object leaves as typed JSON: exact round trips, fixed bytes, and what is refused."""

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import json
import math
import pathlib
import pickle
import sys
import types
import typing
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ckpt.errors import CorruptError, UnsupportedError
from torch_ckpt.objects import (
    ObjectError,
    ObjectFile,
    decode_object,
    dumps_objects,
    encode_object,
    loads_objects,
    object_digest,
)

Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    a: int
    b: str = "b"


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


def same(a, b):
    """Equality of value and of type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad:
            return False
        raw = [t.detach().resolve_conj().resolve_neg() for t in (a, b)]
        raw = [torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in raw]
        return torch.equal(*(t.flatten().view(torch.uint8) for t in raw))
    if isinstance(a, (np.ndarray, np.generic)):
        return (
            a.dtype == b.dtype
            and a.dtype.char == b.dtype.char
            and a.shape == b.shape
            and (a.tobytes() == b.tobytes())
        )
    if isinstance(a, float):
        return (
            math.isnan(a)
            and math.isnan(b)
            or (a == b and math.copysign(1, a) == math.copysign(1, b))
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue() and a.tell() == b.tell()
    if isinstance(a, dict):
        extra = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return (
            extra
            and len(a) == len(b)
            and all(
                same(k, j) and same(v, w)
                for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
            )
        )
    if isinstance(a, (list, tuple, collections.deque)):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, (datetime.datetime, datetime.time)):
        return repr(a) == repr(b)
    if isinstance(a, decimal.Decimal):
        return a.as_tuple() == b.as_tuple()
    return a == b


def round_trip(obj, **kwargs):
    text, side = dumps_objects({"x.y": obj}, file_id="f" * 32, **kwargs)
    assert text.isascii()
    return loads_objects(text, b"".join(side), **kwargs)["x.y"]


DTYPES = [
    value
    for value in vars(torch).values()
    if type(value) is torch.dtype and not str(value).startswith(("torch.q", "torch.bits"))
]
EXAMPLES = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**63, 10**5000, -(7**9000), 0.0, -0.0, 1.5,
    5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf, 1j, complex(-0.0, math.inf),
    complex(math.nan, -0.0), "", "text", "é\u2028\0\n", "\ud800", "\ud83d\ude00", "😀", b"", b"\0\xff",
    bytearray(b"ab"), b"z" * 70000, [], (), [[], ()], [1, 1.0, True, "1", None], (1, (2, [3])), {}, {"a": 1},
    {"$": 1}, {"a": {"$": "tuple", "v": []}}, {1: "int", "1": "str", (1, 2): [3], None: 0, 2.5: 1, b"k": 2},
    {"\ud800": 1}, {True: 1}, collections.OrderedDict([("b", 1), ("a", 2)]), collections.OrderedDict(),
    collections.defaultdict(int, {"a": 1}), collections.defaultdict(None), collections.defaultdict(list, {1: [2]}),
    argparse.Namespace(), argparse.Namespace(rate=0.1, more=argparse.Namespace(a=(1, 2))),
    types.SimpleNamespace(x=[1], y=None), collections.Counter("abca"), set(), {1, "a", (2,)}, frozenset({1, 2}), collections.deque([1, 2], 5),
    collections.deque(), range(0), range(3, -10**30, -2), slice(None), slice(1, 2.5, "x"), Point(1, [2]), Typed(1),
    Color.RED, Level.LOW, Bits.A, torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda:3"),
    torch.device("cpu"), torch.strided, torch.sparse_coo, torch.channels_last,
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc, fold=1),
    datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(seconds=-3601), "né")),
    datetime.datetime(9999, 12, 31, tzinfo=datetime.timezone(datetime.timedelta(0), "zero")),
    datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4, fold=1), datetime.timedelta(-1, 2, 3), datetime.timedelta.max,
    pathlib.PurePosixPath("a/b"), pathlib.Path("/x y"), pathlib.PureWindowsPath("C:\\x"),
    pathlib.PurePosixPath("\udcff"), uuid.UUID(int=5),
    decimal.Decimal("-0"), decimal.Decimal("sNaN12"), decimal.Decimal("1e-1000"), decimal.Decimal("9" * 6000),
    fractions.Fraction(-3, 7), fractions.Fraction(10**6000, 3), io.BytesIO(b"abc"),
    (torch.tensor(1.5), torch.zeros(0, 3), torch.arange(6).view(2, 3).t()),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).imag.neg(), torch.ones(2, requires_grad=True)),
    [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    (torch.zeros(40000), torch.zeros(40000)),
    [torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag],
    np.bool_(True), np.int64(1), np.longlong(1), np.ulonglong(1), np.float16(1.5), np.float64("nan"), np.longdouble(1),
    np.complex64(1j), np.datetime64("2024-01-01T01", "ns"), np.datetime64("NaT"), np.timedelta64(5, "25s"),
    np.str_("é"), np.bytes_(b"ab"), np.str_(""), np.array(3), np.zeros((0, 3), np.int8), np.array(["ab", "c"]),
    np.arange(12, dtype=">i4").reshape(3, 4), np.arange(12).reshape(3, 4)[:, ::2], np.arange(12.0).reshape(3, 4).T,
    np.array([1, 2], np.longlong), np.array(["2024-01-01"], "M8[D]"), np.zeros(100000), np.zeros((2, 2), np.clongdouble),
]  # fmt: skip


@pytest.mark.parametrize("obj", EXAMPLES, ids=lambda obj: f"{type(obj).__name__}")
def test_comes_back_equal_and_of_the_same_type(obj):
    assert same(obj, round_trip(obj))
    assert same((obj, [obj], {0: obj}), round_trip((obj, [obj], {0: obj})))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_every_dtype(dtype):
    raw = torch.arange(1, 1 + 6 * dtype.itemsize, dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    for tensor in (raw.view(dtype).view(2, 3), raw[: dtype.itemsize].view(dtype).view(())):
        back = round_trip((tensor,))[0]
        assert back.dtype is dtype and back.shape == tensor.shape
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_position_order_and_writability_are_kept():
    stream = io.BytesIO(b"abcdef")
    stream.seek(4)
    assert same(stream, round_trip(stream))
    array = round_trip(np.arange(6.0).reshape(2, 3).T)
    assert array.flags.f_contiguous and array.flags.writeable
    assert isinstance(array.tolist(), list)


_keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text(st.characters(exclude_categories=()))),
)  # fmt: skip
_leaves = st.one_of(
    _keys,
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.integers(-(10**400), 10**400),
    st.decimals(),
    st.fractions(),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)),
    st.times(),
    st.dates(),
    st.timedeltas(),
    st.uuids(),
    st.builds(bytearray, st.binary()),
    st.sampled_from([Color.RED, torch.float8_e5m2, np.int8(3), np.float32(0.1), Point(1, 2)]),
)
_objects = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(_keys, inner),
        st.dictionaries(st.text(), inner),
        st.dictionaries(_keys, inner).map(collections.OrderedDict),
        st.dictionaries(_keys, inner).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Point, inner, inner),
        st.sets(_keys),
        st.frozensets(_keys),
        st.lists(inner).map(collections.deque),
    ),
    max_leaves=20,
)


@settings(max_examples=150)
@given(_objects)
def test_any_object_comes_back(obj):
    assert same(obj, round_trip(obj))
    assert object_digest(obj, "x") == object_digest(round_trip(obj), "x")


def test_the_bytes_are_fixed():
    leaves = {
        "step": 7,
        "lr": 0.1,
        "groups": [{"betas": (0.9, 0.999), "foreach": None, "decoupled": True}],
        "state": {0: "a", "0": b"\1\2"},
        "ids": {"b", "a"},
        "size": torch.Size([2]),
        "pair": (torch.tensor([1, 2], dtype=torch.int16),),
        "arr": (np.array([1.0], "<f4"), np.int64(5)),
        "color": Point(x=math.nan, y=2**70),
    }
    text, side = dumps_objects(leaves, file_id="0123456789abcdef" * 2)
    assert not side
    assert text == (
        '{"format_version":1,"file_id":"0123456789abcdef0123456789abcdef","side_bytes":0,"objects":{\n'
        '"step":7,\n"lr":0.1,\n'
        '"groups":[{"betas":{"$":"tuple","v":[0.9,0.999]},"foreach":null,"decoupled":true}],\n'
        '"state":{"$":"dict","v":[[0,"a"],["0",{"$":"bytes","b":"AQI="}]]},\n'
        '"ids":{"$":"set","v":["a","b"]},\n'
        '"size":{"$":"size","v":[2]},\n'
        '"pair":{"$":"tuple","v":[{"$":"tensor","t":"int16","s":[2],"g":false,"b":"AQACAA=="}]},\n'
        '"arr":{"$":"tuple","v":[{"$":"ndarray","t":"<f4","s":[1],"o":"C","b":"AACAPw=="},'
        '{"$":"npscalar","t":"<i8","b":"BQAAAAAAAAA="}]},\n'
        f'"color":{{"$":"namedtuple","c":"{__name__}:Point","f":["x","y"],'
        '"v":[{"$":"float","v":"nan"},{"$":"int","v":"0x400000000000000000"}]}\n}}\n'
    )


def test_large_bytes_stand_in_the_side_file():
    leaves = {
        "small": b"s" * 65536,
        "large": [b"a" * 40000, b"b" * 40000, b"c" * 20000],
        "t": (torch.ones(9999, 2),),
    }
    text, side = dumps_objects(leaves, file_id="0" * 32)
    assert [len(piece) for piece in side] == [40000, 79992]
    assert '"at":[0,40000]' in text and '"at":[40000,79992]' in text
    back = loads_objects(text, b"".join(side))
    assert same(leaves, back)
    part = ObjectFile(text).load(["t"], side=memoryview(b"".join(side)))
    assert list(part) == ["t"] and same(part["t"], leaves["t"])
    with pytest.raises(CorruptError, match="120000? bytes|119991 bytes instead of 119992"):
        loads_objects(text, b"".join(side)[:-1])


def test_sets_encode_alike_in_every_process():
    assert encode_object({"b", "a", "c", 1}) == encode_object({1, "c", "b", "a"})
    assert object_digest([1], "x") != object_digest([True], "x") != object_digest((1,), "x")
    big = b"a" * 70000
    assert object_digest(big, "x") != object_digest(b"b" + big[1:], "x")


class Custom:
    pass


class MyDict(dict):
    pass


class MyInt(int):
    pass


@pytest.mark.parametrize(
    "obj, word",
    [
        (Custom(), "Custom"),
        (functools.partial(int, 1), "partial"),
        (lambda: 0, "function"),
        (MyDict(), "MyDict"),
        (MyInt(1), "MyInt"),
        (Bits.A | Bits.B, "Bits"),
        (int, "type"),
        (np.array([object()]), "object"),
        (np.zeros(1, [("a", "i4")]), "dtype"),
        (np.ma.array([1]), "Masked"),
        (collections.defaultdict(lambda: 0), "default_factory"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (memoryview(b""), "memoryview"),
        (datetime.time(tzinfo=type("Z", (datetime.tzinfo,), {})()), "time zone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_its_path(obj, word):
    with pytest.raises(ObjectError, match=rf"^param_groups\.0\.foo: .*{word}") as caught:
        encode_object([{"foo": obj}], "param_groups")
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, UnsupportedError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cycles_and_depth_are_refused_with_the_path():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(ObjectError, match=r"^x\.a\.0: .*contains itself"):
        encode_object(loop, "x")
    deep = leaf = []
    for _ in range(99):
        leaf.append([])
        leaf = leaf[0]
    assert same(deep, round_trip(deep))
    with pytest.raises(ObjectError, match="deeper than 100"):
        encode_object([deep], "x")
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_pickle_only_for_those_who_asked_on_both_sides():
    text, side = dumps_objects({"f": [functools.partial(int, "7")]}, file_id="0", allow_pickle=True)
    with pytest.raises(UnsupportedError, match=r"^f\.0: .*allow_pickle"):
        loads_objects(text, b"".join(side))
    assert loads_objects(text, b"".join(side), allow_pickle=True)["f"][0]() == 7
    with pytest.raises(ObjectError, match="^x: cannot be pickled"):
        encode_object(lambda: 0, "x", allow_pickle=True)


def test_named_tuple_class_that_is_gone_becomes_a_plain_one():
    value = json.loads(json.dumps(encode_object(Point(1, 2))))
    value["c"] = "no.such.module:Gone"
    with pytest.warns(UserWarning, match="no.such.module:Gone"):
        back = decode_object(value, "x")
    assert back._fields == ("x", "y") and tuple(back) == (1, 2) and type(back).__name__ == "Gone"
    assert "no" not in sys.modules
    value["f"] = ["x", "z"]
    assert decode_object(value, "x").z == 2


def test_looking_up_a_class_runs_no_code(monkeypatch):
    ran = []
    lazy = types.ModuleType("lazy_module_for_test")
    lazy.__getattr__ = ran.append  # PEP 562: what an attribute access would call
    monkeypatch.setitem(sys.modules, "lazy_module_for_test", lazy)

    class Sly(collections.namedtuple("Sly", "a")):
        def __new__(cls, *values):
            ran.append(values)
            return super().__new__(cls, *values)

    lazy.Sly = Sly
    for reference in ("lazy_module_for_test:Thing", "lazy_module_for_test:Sly.missing"):
        with pytest.raises(UnsupportedError, match="not imported"):
            decode_object({"$": "enum", "c": reference, "n": "A"})
    back = decode_object({"$": "namedtuple", "c": "lazy_module_for_test:Sly", "f": ["a"], "v": [1]})
    assert type(back) is Sly and back.a == 1 and ran == []
