"""JSON value -> object leaf. Strict, bounded, and without running anything the file names: classes
of named tuples and enums are looked up among those already imported, pickles are refused.

The input is untrusted. Whatever breaks the grammar is a CorruptObjectError; what is in order but
cannot be given back here (an enum class that is not imported, a pickle) an UnsupportedObjectError.
"""

from __future__ import annotations

import base64
import binascii
import collections
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import io
import math
import pickle
import re
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.objects.types import (
    DTYPES,
    FACTORIES,
    LAYOUTS,
    MAX_DEPTH,
    MEMORY_FORMATS,
    PATHS,
    TAG,
    CorruptObjectError,
    UnsupportedObjectError,
    find_loaded_class,
    is_namedtuple_class,
)

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_NUMPY_CODE = re.compile(
    r"[<>|=](b1|[iu][1248]|[qQ]|f(2|4|8|12|16)|c(8|16|24|32)|[SU][0-9]{1,9}"
    r"|[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_warned_classes: set[str] = set()


class Decoder:
    """Decodes one leaf after another against one side file. Not for several threads.

    Side bytes may be used once in total, so that a small file cannot expand into much memory.
    """

    def __init__(self, side: bytes | memoryview, allow_pickle: bool, path: str = "") -> None:
        self.path = path
        self._side = memoryview(side)
        self._side_left = len(self._side)
        self._allow_pickle = allow_pickle
        self._depth = 0

    def decode(self, value: Any) -> Any:
        """Return the object that `value` describes. Raises ObjectError."""
        kind = type(value)
        if kind is str:
            return self._unicode(value)
        if kind is list:
            return self._items(value)
        if kind is dict:
            if TAG in value:
                return self._tagged(value)
            self._enter()
            out = {self._unicode(key): self.decode(member) for key, member in value.items()}
            self._depth -= 1
            return out
        if kind is float and not math.isfinite(value):
            raise self.fail("a number beyond the range of a float")
        if kind in _PLAIN:
            return value
        raise self.fail(f"a value of type {kind.__name__}")

    def _unicode(self, text: str) -> str:
        """Text that JSON says; surrogates have a tag of their own."""
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise self.fail("text with a surrogate") from None
        return text

    def fail(self, why: str) -> CorruptObjectError:
        return CorruptObjectError(f"{self.path or '(object)'}: malformed object: {why}")

    def _unsupported(self, why: str) -> UnsupportedObjectError:
        return UnsupportedObjectError(f"{self.path or '(object)'}: {why}")

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} containers")

    def _tagged(self, value: dict[str, Any]) -> Any:
        tag = value[TAG]
        entry = _HANDLERS.get(tag) if type(tag) is str else None
        if entry is None:
            raise self.fail(f"unknown tag {tag!r:.100}")
        members, handler = entry
        given = set(value)
        if given != members and not (
            "data" in members
            and given - {"b", "at"} == members - {"data"}
            and len(given & _DATA) == 1
        ):
            raise self.fail(f"tag {tag!r} with members {sorted(given)!r:.200}")
        try:
            return handler(self, value)
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            OverflowError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            if isinstance(error, (CorruptObjectError, UnsupportedObjectError, RecursionError)):
                raise
            raise self.fail(f"tag {tag!r}: {type(error).__name__}: {error}"[:400]) from error

    # Parts of tagged objects.

    def _items(self, value: Any) -> list[Any]:
        if type(value) is not list:
            raise self.fail(f"expected a list, found {type(value).__name__}")
        self._enter()
        out = [self.decode(item) for item in value]
        self._depth -= 1
        return out

    def _hashables(self, value: Any) -> list[Any]:
        items = self._items(value)
        if len(set(items)) != len(items):
            raise self.fail("a set with repeated members")
        return items

    def _pairs(self, value: Any) -> dict[Any, Any]:
        if type(value) is not list:
            raise self.fail(f"expected a list of pairs, found {type(value).__name__}")
        self._enter()
        out: dict[Any, Any] = {}
        for pair in value:
            if type(pair) is not list or len(pair) != 2:
                raise self.fail("a mapping entry that is not a pair")
            key = self.decode(pair[0])
            if key in out:
                raise self.fail("a mapping with a repeated key")
            out[key] = self.decode(pair[1])
        self._depth -= 1
        return out

    def _ints(self, value: Any, count: int | None = None) -> list[int]:
        if type(value) is not list or any(type(item) is not int for item in value):
            raise self.fail("expected a list of integers")
        if count is not None and len(value) != count:
            raise self.fail(f"expected {count} integers, found {len(value)}")
        return value

    def _text(self, value: Any) -> str:
        text = self.decode(value) if type(value) is dict else value
        if type(text) is not str:
            raise self.fail(f"expected text, found {type(text).__name__}")
        return text

    def _big_ints(self, value: Any, count: int) -> list[int]:
        items = self._items(value)
        return self._ints(items, count)

    def _bytes(self, value: dict[str, Any]) -> bytes:
        if "b" in value:
            text = value["b"]
            if type(text) is not str:
                raise self.fail("inline bytes that are not text")
            try:
                return base64.b64decode(text.encode("ascii"), validate=True)
            except (binascii.Error, UnicodeEncodeError) as error:
                raise self.fail("inline bytes that are not base64") from error
        offset, size = self._ints(value["at"], 2)
        if offset < 0 or size < 0 or offset + size > len(self._side):
            raise self.fail(
                f"bytes [{offset}, {offset + size}) of a side file of {len(self._side)} bytes"
            )
        self._side_left -= size
        if self._side_left < 0:
            raise self.fail("side file bytes used more than once")
        return bytes(self._side[offset : offset + size])

    def _shape(self, value: Any, itemsize: int, nbytes: int) -> list[int]:
        """Check that a shape describes exactly `nbytes` before anything is allocated for it."""
        shape = self._ints(value)
        if len(shape) > 64 or any(not 0 <= size < 2**63 for size in shape):
            raise self.fail(f"shape {shape!r:.200}")
        if math.prod(shape) * itemsize != nbytes:
            raise self.fail(f"shape {shape} of {itemsize}-byte elements with {nbytes} bytes")
        return shape

    # Scalars.

    def _int(self, value: dict[str, Any]) -> int:
        text = value["v"]
        if type(text) is not str or not _HEX_INT.fullmatch(text):
            raise self.fail("an integer that is not hexadecimal text")
        return int(text, 16)

    def _float(self, value: dict[str, Any]) -> float:
        if value["v"] not in ("nan", "inf", "-inf"):
            raise self.fail("a special float that is none of nan, inf, -inf")
        return float(value["v"])

    def _str(self, value: dict[str, Any]) -> str:
        return bytes.fromhex(value["v"]).decode("utf-8", "surrogatepass")

    def _complex(self, value: dict[str, Any]) -> complex:
        parts = self._items(value["v"])
        if len(parts) != 2 or any(type(part) is not float for part in parts):
            raise self.fail("a complex number that is not two floats")
        return complex(parts[0], parts[1])

    def _bytearray(self, value: dict[str, Any]) -> bytearray:
        return bytearray(self._bytes(value))

    def _bytesio(self, value: dict[str, Any]) -> io.BytesIO:
        position = self._ints([value["p"]])[0]
        stream = io.BytesIO(self._bytes(value))
        stream.seek(position)
        return stream

    # Containers.

    def _tuple(self, value: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._items(value["v"]))

    def _namedtuple(self, value: dict[str, Any]) -> Any:
        reference, fields = value["c"], value["f"]
        items = self._items(value["v"])
        if type(reference) is not str or type(fields) is not list or len(fields) != len(items):
            raise self.fail("a named tuple whose fields and values differ in number")
        if any(type(name) is not str for name in fields):
            raise self.fail("a named tuple with a field name that is not text")
        cls: Any = find_loaded_class(reference)
        if cls is None or not is_namedtuple_class(cls) or list(cls._fields) != fields:
            cls = _plain_namedtuple(reference.rpartition(":")[2].rpartition(".")[2], tuple(fields))
            if reference not in _warned_classes:
                _warned_classes.add(reference)
                warnings.warn(
                    f"{self.path}: the named tuple class {reference} is not imported or has other "
                    "fields here; a plain named tuple with the saved fields takes its place",
                    stacklevel=2,
                )
        # Not cls(...): a class's own __new__ is not run on a file's values.
        return tuple.__new__(cls, items)

    def _dict(self, value: dict[str, Any]) -> dict[Any, Any]:
        return self._pairs(value["v"])

    def _ordered_dict(self, value: dict[str, Any]) -> OrderedDict[Any, Any]:
        return OrderedDict(self._pairs(value["v"]))

    def _counter(self, value: dict[str, Any]) -> Counter[Any]:
        counter: Counter[Any] = Counter()
        dict.update(counter, self._pairs(value["v"]))
        return counter

    def _defaultdict(self, value: dict[str, Any]) -> defaultdict[Any, Any]:
        return defaultdict(FACTORIES[value["f"]], self._pairs(value["v"]))

    def _set(self, value: dict[str, Any]) -> set[Any]:
        return set(self._hashables(value["v"]))

    def _frozenset(self, value: dict[str, Any]) -> frozenset[Any]:
        return frozenset(self._hashables(value["v"]))

    def _deque(self, value: dict[str, Any]) -> deque[Any]:
        limit, items = value["m"], self._items(value["v"])
        if limit is not None and (type(limit) is not int or limit < len(items)):
            raise self.fail("a deque longer than its limit")
        return deque(items, limit)

    def _range(self, value: dict[str, Any]) -> range:
        return range(*self._big_ints(value["v"], 3))

    def _slice(self, value: dict[str, Any]) -> slice:
        start, stop, step = self._items(value["v"])
        return slice(start, stop, step)

    def _size(self, value: dict[str, Any]) -> torch.Size:
        return torch.Size(self._ints(value["v"]))

    # Standard library values.

    def _zone(self, value: Any) -> datetime.timezone | None:
        if value is None:
            return None
        if type(value) is not dict or set(value) != {"offset", "name"}:
            raise self.fail("a time zone")
        offset = datetime.timedelta(microseconds=self._ints([value["offset"]])[0])
        if value["name"] is None:
            return datetime.timezone(offset)
        return datetime.timezone(offset, self._text(value["name"]))

    def _datetime(self, value: dict[str, Any]) -> datetime.datetime:
        *parts, fold = self._ints(value["v"], 8)
        return datetime.datetime(*parts, tzinfo=self._zone(value["tz"]), fold=fold)  # type: ignore[arg-type,misc]

    def _time(self, value: dict[str, Any]) -> datetime.time:
        *parts, fold = self._ints(value["v"], 5)
        return datetime.time(*parts, tzinfo=self._zone(value["tz"]), fold=fold)  # type: ignore[arg-type,misc]

    def _date(self, value: dict[str, Any]) -> datetime.date:
        return datetime.date(*self._ints(value["v"], 3))

    def _timedelta(self, value: dict[str, Any]) -> datetime.timedelta:
        return datetime.timedelta(*self._ints(value["v"], 3))

    def _path_object(self, value: dict[str, Any]) -> Any:
        return PATHS[value["t"]](self._text(value["v"]))

    def _uuid(self, value: dict[str, Any]) -> uuid.UUID:
        return uuid.UUID(hex=self._text(value["v"]))

    def _decimal(self, value: dict[str, Any]) -> decimal.Decimal:
        return decimal.Decimal(self._text(value["v"]))

    def _fraction(self, value: dict[str, Any]) -> fractions.Fraction:
        numerator, denominator = self._big_ints(value["v"], 2)
        return fractions.Fraction(numerator, denominator)

    # torch and numpy values.

    def _dtype(self, value: dict[str, Any]) -> torch.dtype:
        return DTYPES[value["v"]]

    def _device(self, value: dict[str, Any]) -> torch.device:
        return torch.device(self._text(value["v"]))

    def _layout(self, value: dict[str, Any]) -> torch.layout:
        return LAYOUTS[value["v"]]

    def _memory_format(self, value: dict[str, Any]) -> torch.memory_format:
        return MEMORY_FORMATS[value["v"]]

    def _tensor(self, value: dict[str, Any]) -> torch.Tensor:
        dtype, requires_grad = DTYPES[value["t"]], value["g"]
        if type(requires_grad) is not bool:
            raise self.fail("a tensor whose requires_grad is not true or false")
        data = self._bytes(value)
        shape = self._shape(value["s"], dtype.itemsize, len(data))
        tensor = torch.empty(shape, dtype=dtype)
        if data:
            ctypes.memmove(tensor.data_ptr(), data, len(data))
        if value[TAG] == "parameter":
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor

    def _numpy_dtype(self, value: Any) -> tuple[Any, Any]:
        if type(value) is not str or not _NUMPY_CODE.fullmatch(value):
            raise self.fail(f"numpy type code {value!r:.100}")
        try:
            import numpy
        except ImportError as error:
            raise self._unsupported("this value needs numpy, which is not installed") from error
        return numpy, numpy.dtype(value)

    def _npscalar(self, value: dict[str, Any]) -> Any:
        numpy, dtype = self._numpy_dtype(value["t"])
        data = self._bytes(value)
        self._shape([], dtype.itemsize, len(data))
        if not data:  # an empty numpy.str_ or numpy.bytes_; numpy.ndarray has no such element
            return dtype.type()
        return numpy.ndarray((), dtype, data)[()]

    def _ndarray(self, value: dict[str, Any]) -> Any:
        numpy, dtype = self._numpy_dtype(value["t"])
        if value["o"] not in ("C", "F"):
            raise self.fail("an array whose order is neither C nor F")
        data = self._bytes(value)
        shape = self._shape(value["s"], dtype.itemsize, len(data))
        return numpy.ndarray(shape, dtype, bytearray(data), order=value["o"])

    # What needs a class or an opt-in.

    def _enum(self, value: dict[str, Any]) -> enum.Enum:
        reference, name = self._text(value["c"]), self._text(value["n"])
        cls = find_loaded_class(reference)
        if cls is None or not issubclass(cls, enum.Enum):
            raise self._unsupported(
                f"the enum class {reference} is not imported here; import its module before loading"
            )
        member = type.__getattribute__(cls, "_member_map_").get(name)
        if member is None:
            raise self._unsupported(f"the enum class {reference} has no member {name!r}")
        return member  # type: ignore[no-any-return]

    def _pickle(self, value: dict[str, Any]) -> Any:
        if not self._allow_pickle:
            raise self._unsupported(
                "was saved as a pickle, which can run any code when read; pass allow_pickle=True "
                "if you trust who wrote this checkpoint"
            )
        data = self._bytes(value)
        try:
            return pickle.loads(data)
        except Exception as error:  # whatever a foreign __setstate__ raises
            raise self._unsupported(f"cannot be unpickled: {error}") from error


_PLAIN = frozenset({type(None), bool, int, float})
_DATA = frozenset({"b", "at"})


@functools.lru_cache(maxsize=256)
def _plain_namedtuple(name: str, fields: tuple[str, ...]) -> type:
    """A named tuple class; collections.namedtuple refuses names that are not identifiers."""
    return collections.namedtuple(name, fields)


def _entry(
    members: str, handler: Callable[[Decoder, dict[str, Any]], Any]
) -> tuple[frozenset[str], Callable[[Decoder, dict[str, Any]], Any]]:
    return frozenset([TAG, *members.split()]), handler


# Tag -> the members it must have beside "$" ("data" stands for either "b" or "at") and its reader.
_HANDLERS = {
    "int": _entry("v", Decoder._int),
    "float": _entry("v", Decoder._float),
    "str": _entry("v", Decoder._str),
    "complex": _entry("v", Decoder._complex),
    "bytes": _entry("data", Decoder._bytes),
    "bytearray": _entry("data", Decoder._bytearray),
    "bytesio": _entry("p data", Decoder._bytesio),
    "tuple": _entry("v", Decoder._tuple),
    "namedtuple": _entry("c f v", Decoder._namedtuple),
    "dict": _entry("v", Decoder._dict),
    "odict": _entry("v", Decoder._ordered_dict),
    "counter": _entry("v", Decoder._counter),
    "defaultdict": _entry("f v", Decoder._defaultdict),
    "set": _entry("v", Decoder._set),
    "frozenset": _entry("v", Decoder._frozenset),
    "deque": _entry("m v", Decoder._deque),
    "range": _entry("v", Decoder._range),
    "slice": _entry("v", Decoder._slice),
    "size": _entry("v", Decoder._size),
    "datetime": _entry("v tz", Decoder._datetime),
    "date": _entry("v", Decoder._date),
    "time": _entry("v tz", Decoder._time),
    "timedelta": _entry("v", Decoder._timedelta),
    "path": _entry("t v", Decoder._path_object),
    "uuid": _entry("v", Decoder._uuid),
    "decimal": _entry("v", Decoder._decimal),
    "fraction": _entry("v", Decoder._fraction),
    "dtype": _entry("v", Decoder._dtype),
    "device": _entry("v", Decoder._device),
    "layout": _entry("v", Decoder._layout),
    "memory_format": _entry("v", Decoder._memory_format),
    "tensor": _entry("t s g data", Decoder._tensor),
    "parameter": _entry("t s g data", Decoder._tensor),
    "npscalar": _entry("t data", Decoder._npscalar),
    "ndarray": _entry("t s o data", Decoder._ndarray),
    "enum": _entry("c n", Decoder._enum),
    "pickle": _entry("data", Decoder._pickle),
}


def decode_object(
    value: Any, path: str = "", *, allow_pickle: bool = False, side: bytes | memoryview = b""
) -> Any:
    """Return the object that `value`, as encode_object made it and JSON brought it back, describes.

    Raises CorruptObjectError where `value` breaks the grammar, UnsupportedObjectError for a pickle
    without `allow_pickle` and for an enum class that is not imported. Both name `path`.
    """
    decoder = Decoder(side, allow_pickle, path)
    try:
        return decoder.decode(value)
    except RecursionError as error:
        raise decoder.fail("nested too deeply") from error
