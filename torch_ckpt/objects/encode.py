"""Object leaf -> JSON value. Nothing is written that decode.py would not give back equal and of the
same type; everything else is refused with its path.

What JSON says exactly (None, bool, ints of 64 bits, finite floats, str, list, dict with str keys)
stays plain JSON; all else is a tagged object {"$": tag, ...}.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import pickle
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_ckpt.objects.types import (
    DTYPES,
    FACTORIES,
    LAYOUTS,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_INLINE_BYTES,
    MAX_PLAIN_INT,
    MEMORY_FORMATS,
    MICROSECOND,
    NAMESPACES,
    PATHS,
    STOOD_FOR,
    TAG,
    UnsupportedObjectError,
    class_reference,
    find_listed_class,
    find_loaded_class,
    is_namedtuple_class,
    is_record_class,
    torch_name,
)

_NAMESPACE_NAMES = {cls: name for name, cls in NAMESPACES.items()}
_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}
# numpy dtype kinds that are plain values: bool, ints, floats, complex, datetime, timedelta, text.
_NUMPY_KINDS = frozenset("biufcmMSU")


class SideBytes:
    """The side file under construction: large byte strings, in the order they were met."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> int:
        """Append `data` and return its offset in the side file, in bytes."""
        offset = self.size
        self.pieces.append(data)
        self.size += len(data)
        return offset


class Encoder:
    """Encodes one leaf. Not for several threads."""

    def __init__(self, path: str, allow_pickle: bool, side: SideBytes | None) -> None:
        self._path: list[Any] = [path] if path else []
        self._allow_pickle = allow_pickle
        self._side = side
        self._inline = 0
        self._depth = 0
        self._open: set[int] = set()

    def encode(self, obj: Any) -> Any:
        """Return the JSON value of `obj`. Raises UnsupportedObjectError."""
        handler = _HANDLERS.get(type(obj))
        if handler is not None:
            return handler(self, obj)
        return self._encode_rare(obj)

    def fail(self, why: str) -> UnsupportedObjectError:
        path = ".".join(_key_text(name) for name in self._path)
        return UnsupportedObjectError(f"{path or '(object)'}: {why}")

    def _enter(self, obj: Any) -> None:
        """Count a container; also what ends a container that holds itself."""
        if id(obj) in self._open:
            raise self.fail(f"a {type(obj).__qualname__} that contains itself cannot be written")
        if self._depth >= MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} containers")
        self._open.add(id(obj))
        self._depth += 1

    def _leave(self, obj: Any) -> None:
        self._depth -= 1
        self._open.discard(id(obj))

    def _child(self, name: Any, obj: Any) -> Any:
        self._path.append(name)
        value = self.encode(obj)
        self._path.pop()
        return value

    def _sequence(self, owner: Any, items: Iterable[Any]) -> list[Any]:
        self._enter(owner)
        out = [
            item if type(item) in _ALWAYS_PLAIN else self._child(i, item)
            for i, item in enumerate(items)
        ]
        self._leave(owner)
        return out

    def _pairs(self, obj: dict[Any, Any]) -> list[list[Any]]:
        self._enter(obj)
        out = [[self._child(k, k), self._child(k, v)] for k, v in obj.items()]
        self._leave(obj)
        return out

    def _data(self, data: bytes) -> dict[str, Any]:
        """The members that say where `data` is: {"b": base64} or {"at": [offset, size]}."""
        if self._side is not None and self._inline + len(data) > MAX_INLINE_BYTES:
            return {"at": [self._side.add(data), len(data)]}
        self._inline += len(data)
        return {"b": base64.b64encode(data).decode("ascii")}

    # Scalars.

    def _plain(self, obj: Any) -> Any:
        return obj

    def _int(self, obj: int) -> Any:
        if -MAX_PLAIN_INT <= obj <= MAX_PLAIN_INT:
            return obj
        return {TAG: "int", "v": hex(obj)}

    def _float(self, obj: float) -> Any:
        if math.isfinite(obj):
            return obj
        return {TAG: "float", "v": repr(obj)}

    def _str(self, obj: str) -> Any:
        if obj.isascii() or _is_unicode(obj):
            return obj
        # JSON cannot keep surrogates apart from the character that a pair of them means.
        return {TAG: "str", "v": obj.encode("utf-8", "surrogatepass").hex()}

    def _complex(self, obj: complex) -> Any:
        return {TAG: "complex", "v": [self._float(obj.real), self._float(obj.imag)]}

    def _bytes(self, obj: bytes) -> Any:
        return {TAG: "bytes", **self._data(obj)}

    def _bytearray(self, obj: bytearray) -> Any:
        return {TAG: "bytearray", **self._data(bytes(obj))}

    def _bytesio(self, obj: io.BytesIO) -> Any:
        return {TAG: "bytesio", "p": obj.tell(), **self._data(obj.getvalue())}

    # Containers.

    def _list(self, obj: list[Any]) -> Any:
        return self._sequence(obj, obj)

    def _tuple(self, obj: tuple[Any, ...]) -> Any:
        return {TAG: "tuple", "v": self._sequence(obj, obj)}

    def _dict(self, obj: dict[Any, Any]) -> Any:
        for key in obj:
            if type(key) is not str or key == TAG or not (key.isascii() or _is_unicode(key)):
                return {TAG: "dict", "v": self._pairs(obj)}
        self._enter(obj)
        out = {
            key: value if type(value) in _ALWAYS_PLAIN else self._child(key, value)
            for key, value in obj.items()
        }
        self._leave(obj)
        return out

    def _ordered_dict(self, obj: OrderedDict[Any, Any]) -> Any:
        return {TAG: "odict", "v": self._pairs(obj)}

    def _counter(self, obj: Counter[Any]) -> Any:
        return {TAG: "counter", "v": self._pairs(obj)}

    def _check_attributes(self, obj: Any) -> None:
        for name in vars(obj):
            if type(name) is not str:
                raise self.fail(f"has an attribute {name!r:.100}, which is no name")

    def _namespace(self, obj: argparse.Namespace | types.SimpleNamespace) -> Any:
        self._check_attributes(obj)
        return {TAG: "namespace", "t": _NAMESPACE_NAMES[type(obj)], "v": self._pairs(vars(obj))}

    def _defaultdict(self, obj: defaultdict[Any, Any]) -> Any:
        factory = obj.default_factory
        try:
            name = _FACTORY_NAMES.get(factory)
        except TypeError:  # an unhashable callable
            name = None
        if name is None:
            if self._allow_pickle:
                return self._pickle(obj)
            raise self.fail(
                f"a defaultdict with default_factory {factory!r} cannot be written; "
                f"only {', '.join(FACTORIES)} can"
            )
        return {TAG: "defaultdict", "f": name, "v": self._pairs(obj)}

    def _set(self, obj: set[Any] | frozenset[Any]) -> Any:
        # Sorted by their text: the order of a set differs from process to process, and ranks
        # compare digests of what they encode.
        items = sorted(self._sequence(obj, obj), key=json.dumps)
        return {TAG: "set" if type(obj) is set else "frozenset", "v": items}

    def _deque(self, obj: deque[Any]) -> Any:
        return {TAG: "deque", "m": obj.maxlen, "v": self._sequence(obj, obj)}

    def _range(self, obj: range) -> Any:
        return {TAG: "range", "v": [self._int(obj.start), self._int(obj.stop), self._int(obj.step)]}

    def _slice(self, obj: slice) -> Any:
        return {TAG: "slice", "v": self._sequence(obj, (obj.start, obj.stop, obj.step))}

    def _size(self, obj: torch.Size) -> Any:
        return {TAG: "size", "v": list(obj)}

    # Standard library values.

    def _pickles_zone(self, zone: datetime.tzinfo | None) -> bool:
        return self._allow_pickle and zone is not None and type(zone) is not datetime.timezone

    def _zone(self, zone: datetime.tzinfo | None) -> Any:
        if zone is None:
            return None
        if type(zone) is not datetime.timezone:
            raise self.fail(
                f"time zones of type {type(zone).__qualname__} cannot be written; "
                "only datetime.timezone can"
            )
        # (offset,) or (offset, name): zones that compare equal may still differ in their name.
        arguments = zone.__getinitargs__()  # type: ignore[attr-defined]
        name = self._str(arguments[1]) if len(arguments) > 1 else None
        return {"offset": arguments[0] // MICROSECOND, "name": name}

    def _datetime(self, obj: datetime.datetime) -> Any:
        if self._pickles_zone(obj.tzinfo):
            return self._pickle(obj)
        fields = [obj.year, obj.month, obj.day, obj.hour, obj.minute, obj.second]
        value = [*fields, obj.microsecond, obj.fold]
        return {TAG: "datetime", "v": value, "tz": self._zone(obj.tzinfo)}

    def _time(self, obj: datetime.time) -> Any:
        if self._pickles_zone(obj.tzinfo):
            return self._pickle(obj)
        value = [obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold]
        return {TAG: "time", "v": value, "tz": self._zone(obj.tzinfo)}

    def _date(self, obj: datetime.date) -> Any:
        return {TAG: "date", "v": [obj.year, obj.month, obj.day]}

    def _timedelta(self, obj: datetime.timedelta) -> Any:
        return {TAG: "timedelta", "v": [obj.days, obj.seconds, obj.microseconds]}

    def _path_object(self, obj: Any) -> Any:
        return {TAG: "path", "t": type(obj).__name__, "v": self._str(str(obj))}

    def _uuid(self, obj: uuid.UUID) -> Any:
        return {TAG: "uuid", "v": obj.hex}

    def _decimal(self, obj: decimal.Decimal) -> Any:
        return {TAG: "decimal", "v": str(obj)}

    def _fraction(self, obj: fractions.Fraction) -> Any:
        return {TAG: "fraction", "v": [self._int(obj.numerator), self._int(obj.denominator)]}

    # torch values.

    def _dtype(self, obj: torch.dtype) -> Any:
        return {TAG: "dtype", "v": torch_name(obj)}

    def _device(self, obj: torch.device) -> Any:
        return {TAG: "device", "v": str(obj)}

    def _generator(self, obj: torch.Generator) -> Any:
        state = obj.get_state()  # of all that it is, on the CPU
        data = ctypes.string_at(state.data_ptr(), state.nbytes)
        return {TAG: "generator", "d": str(obj.device), **self._data(data)}

    def _layout(self, obj: torch.layout) -> Any:
        if torch_name(obj) not in LAYOUTS:
            raise self.fail(f"{obj!r} cannot be written")
        return {TAG: "layout", "v": torch_name(obj)}

    def _memory_format(self, obj: torch.memory_format) -> Any:
        if torch_name(obj) not in MEMORY_FORMATS:
            raise self.fail(f"{obj!r} cannot be written")
        return {TAG: "memory_format", "v": torch_name(obj)}

    def _tensor(self, obj: torch.Tensor) -> Any:
        dtype = torch_name(obj.dtype)
        dense = obj.layout is torch.strided and not obj.is_nested and not obj.is_quantized
        if not dense or dtype not in DTYPES:
            if self._allow_pickle:
                return self._pickle(obj)
            layout = "nested" if obj.is_nested else str(obj.layout)
            raise self.fail(f"tensors of {layout} and {obj.dtype} cannot be written")
        if obj.dim() > MAX_DIMENSIONS:
            raise self.fail(f"tensors of more than {MAX_DIMENSIONS} dimensions cannot be written")
        if obj.is_meta:
            raise self.fail("a tensor on the meta device has no data to write")
        plain = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
        return {
            TAG: "parameter" if type(obj) is torch.nn.Parameter else "tensor",
            "t": dtype,
            "s": list(obj.shape),
            "g": obj.requires_grad,
            **self._data(data),
        }

    # Types that are found by their base class.

    def _encode_rare(self, obj: Any) -> Any:
        cls = type(obj)
        if isinstance(obj, enum.Enum):
            return self._enum(obj)
        if is_namedtuple_class(cls) and not getattr(obj, "__dict__", None):
            return {
                TAG: "namedtuple",
                "c": class_reference(cls),
                "f": list(obj._fields),
                "v": self._sequence(obj, tuple(obj)),
            }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            scalar = isinstance(obj, numpy.generic) and cls is obj.dtype.type
            if scalar or cls is numpy.ndarray:
                return self._numpy(obj, numpy)
        reference = class_reference(cls)
        listed = reference in STOOD_FOR or (
            # A reader may list other classes: a pickle is read by any that runs pickles.
            not self._allow_pickle and find_listed_class(reference) is cls
        )
        if listed and is_record_class(cls):
            self._check_attributes(obj)
            return {TAG: "record", "c": reference, "v": self._pairs(vars(obj))}
        if self._allow_pickle:
            return self._pickle(obj)
        if isinstance(obj, torch.Tensor):
            raise self.fail(
                f"tensors of type {_type_name(cls)} inside a container that is written as one "
                "object cannot be written; give plain tensors of their values; "
                "torch_ckpt.save takes them in dicts and lists"
            )
        raise self.fail(
            f"objects of type {_type_name(cls)} cannot be written; convert it {_way_out(obj)}; "
            "torch_ckpt.save and its writers store a pickle with allow_pickle=True"
        )

    def _enum(self, obj: enum.Enum) -> Any:
        cls = type(obj)
        name = obj.name
        why = None
        if cls.__members__.get(name) is not obj:
            why = f"{obj!r} has no name of its own; write its parts or its value"
        elif find_loaded_class(class_reference(cls)) is not cls:
            why = f"{_type_name(cls)} is not what its module has by that name; no reader finds it"
        if why is None:
            reference = class_reference(cls)
            said = {TAG: "enum", "c": reference, "n": name}
            if reference in STOOD_FOR and type(obj.value) in (int, str):
                said["v"] = self._child("value", obj.value)
            return said
        if self._allow_pickle:
            return self._pickle(obj)
        raise self.fail(why)

    def _numpy(self, obj: Any, numpy: Any) -> Any:
        dtype = obj.dtype
        code = dtype.str
        if dtype.kind not in _NUMPY_KINDS or dtype.names is not None:
            if self._allow_pickle:
                return self._pickle(obj)
            raise self.fail(f"numpy values of dtype {dtype} cannot be written")
        if dtype.char in "qQ" and numpy.dtype(code).char != dtype.char:
            code = dtype.byteorder.replace("|", "=").replace("=", code[0]) + dtype.char
        if isinstance(obj, numpy.generic):
            # Empty text has elements of 0 bytes, yet numpy gives it a terminator.
            return {TAG: "npscalar", "t": code, **self._data(obj.tobytes()[: dtype.itemsize])}
        order = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
        shape = list(obj.shape)
        return {TAG: "ndarray", "t": code, "s": shape, "o": order, **self._data(obj.tobytes(order))}

    def _pickle(self, obj: Any) -> Any:
        try:
            data = pickle.dumps(obj, protocol=4)
        except Exception as error:  # whatever a foreign __reduce__ raises
            raise self.fail(f"cannot be pickled: {type(error).__name__}: {error}") from error
        return {TAG: "pickle", **self._data(data)}


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _key_text(key: Any) -> str:
    """A path component for messages, short, and safe for integers that str() refuses."""
    if type(key) is int and abs(key) > MAX_PLAIN_INT:
        return hex(key)[:80]
    return str(key)[:200]


def _type_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _way_out(obj: Any) -> str:
    """How `obj` becomes plain data."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return "with dataclasses.asdict(...)"
    if isinstance(obj, (argparse.Namespace, types.SimpleNamespace)):  # of a class below these
        return "with vars(...)"
    return "to plain Python data"


_ALWAYS_PLAIN = frozenset({type(None), bool})

_HANDLERS: dict[type, Callable[[Encoder, Any], Any]] = {
    type(None): Encoder._plain,
    bool: Encoder._plain,
    int: Encoder._int,
    float: Encoder._float,
    str: Encoder._str,
    complex: Encoder._complex,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytearray,
    io.BytesIO: Encoder._bytesio,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered_dict,
    Counter: Encoder._counter,
    defaultdict: Encoder._defaultdict,
    **{cls: Encoder._namespace for cls in NAMESPACES.values()},
    set: Encoder._set,
    frozenset: Encoder._set,
    deque: Encoder._deque,
    range: Encoder._range,
    slice: Encoder._slice,
    torch.Size: Encoder._size,
    datetime.datetime: Encoder._datetime,
    datetime.date: Encoder._date,
    datetime.time: Encoder._time,
    datetime.timedelta: Encoder._timedelta,
    **{cls: Encoder._path_object for cls in PATHS.values()},
    uuid.UUID: Encoder._uuid,
    decimal.Decimal: Encoder._decimal,
    fractions.Fraction: Encoder._fraction,
    torch.dtype: Encoder._dtype,
    torch.device: Encoder._device,
    torch.Generator: Encoder._generator,
    torch.layout: Encoder._layout,
    torch.memory_format: Encoder._memory_format,
    torch.Tensor: Encoder._tensor,
    torch.nn.Parameter: Encoder._tensor,
}


def encode_object(
    obj: Any, path: str = "", *, allow_pickle: bool = False, side: SideBytes | None = None
) -> Any:
    """Return `obj` as a value that json.dumps writes and decode_object turns back.

    `path` starts the path that errors name. Bytes beyond 64 KiB go to `side` where one is given.
    With `allow_pickle`, objects of other types are stored as a pickle instead of refused.
    Raises UnsupportedObjectError, a TypeError, naming the path of what cannot be written.
    """
    return Encoder(path, allow_pickle, side).encode(obj)
