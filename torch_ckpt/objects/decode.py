"""JSON value -> object leaf. Strict, bounded, and without running anything the file names: classes
of named tuples and enums are looked up among those already imported, pickles are refused.

The input is untrusted. Whatever breaks the grammar is a CorruptObjectError; what is in order but
cannot be given back here (an enum class that is not imported, a pickle) an UnsupportedObjectError.
"""

from __future__ import annotations

import collections
import enum
import functools
import math
import pickle
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.errors import warn
from torch_ckpt.objects.decode_values import ValueDecoder
from torch_ckpt.objects.stand_ins import StandIns
from torch_ckpt.objects.types import (
    FACTORIES,
    MAX_DEPTH,
    MAX_PLAIN_INT,
    NAMESPACES,
    STOOD_FOR,
    TAG,
    CorruptObjectError,
    UnsupportedObjectError,
    find_listed_class,
    find_loaded_class,
    is_namedtuple_class,
    is_record_class,
)

_warned_classes: set[str] = set()


class Decoder(ValueDecoder):
    """Decodes one leaf after another against one side file. Not for several threads.

    Side bytes may be used once in total, so that a small file cannot expand into much memory.
    stand_ins: makes what takes the places of named tuples, and of objects of STOOD_FOR's classes,
        that are not imported; None for plain named tuples, and for the objects' values.
    """

    def __init__(
        self,
        side: bytes | memoryview,
        allow_pickle: bool,
        path: str = "",
        stand_ins: StandIns | None = None,
    ) -> None:
        super().__init__(side, allow_pickle, path)
        self._stand_ins = stand_ins

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
            names = self._enter()
            out = {}
            for key, member in value.items():
                names[-1] = key
                out[self._unicode(key)] = self.decode(member)
            names.pop()
            return out
        if kind is int and not -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
            raise self.fail("an integer of more than 64 bits that is not hexadecimal text")
        if kind is float and not math.isfinite(value):
            raise self.fail("a number beyond the range of a float")
        if kind in _PLAIN:
            return value
        raise self.fail(f"a value of type {kind.__name__}")

    def _enter(self) -> list[Any]:
        """Count a container, whose members' names are the last of the names that it returns."""
        if len(self._names) >= MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} containers")
        self._names.append(None)
        return self._names

    def _tagged(self, value: dict[str, Any]) -> Any:
        tag = value[TAG]
        entry = _HANDLERS.get(tag) if type(tag) is str else None
        if entry is None:
            raise self.fail(f"unknown tag {tag!r:.100}")
        members, handler = entry
        if frozenset(value) not in members:
            raise self.fail(f"tag {tag!r} with members {sorted(value)!r:.200}")
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
            AttributeError,  # of a record's own __hash__, as a key
            SyntaxError,  # of a named tuple's fields
        ) as error:
            if isinstance(error, (CorruptObjectError, UnsupportedObjectError, RecursionError)):
                raise
            raise self.fail(f"tag {tag!r}: {type(error).__name__}: {error}"[:400]) from error

    # Parts of tagged objects.

    def _items(self, value: Any) -> list[Any]:
        if type(value) is not list:
            raise self.fail(f"expected a list, found {type(value).__name__}")
        names = self._enter()
        out = []
        for place, item in enumerate(value):
            names[-1] = place
            out.append(self.decode(item))
        names.pop()
        return out

    def _hashables(self, value: Any) -> list[Any]:
        items = self._items(value)
        if len(set(items)) != len(items):
            raise self.fail("a set with repeated members")
        return items

    def _pairs(self, value: Any) -> dict[Any, Any]:
        if type(value) is not list:
            raise self.fail(f"expected a list of pairs, found {type(value).__name__}")
        names = self._enter()
        out: dict[Any, Any] = {}
        for pair in value:
            names[-1] = "(a key)"
            if type(pair) is not list or len(pair) != 2:
                raise self.fail("a mapping entry that is not a pair")
            key = self.decode(pair[0])
            names[-1] = key
            if key in out:
                raise self.fail("a mapping with a repeated key")
            out[key] = self.decode(pair[1])
        names.pop()
        return out

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
            if self._stand_ins is not None:
                message = (
                    f"holds a named tuple of {reference}, a class that is not imported or has "
                    "other fields here, and a pickle names classes; import its module first"
                )
                error = UnsupportedObjectError(message, tensor=self.path or None)
                return self._stand_ins.named_tuple(items, error)
            cls = _plain_namedtuple(reference.rpartition(":")[2].rpartition(".")[2], tuple(fields))
            if reference not in _warned_classes:
                _warned_classes.add(reference)
                warn(
                    f"{self._where()}: the named tuple class {reference} is not imported or has "
                    "other fields here; a plain named tuple with the saved fields takes its place"
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

    def _namespace(self, value: dict[str, Any]) -> Any:
        attributes = self._pairs(value["v"])
        if not all(type(name) is str for name in attributes):
            raise self.fail("an attribute has no name")
        space = NAMESPACES[value["t"]]()
        vars(space).update(attributes)
        return space

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

    # What needs a class or an opt-in.

    def _enum(self, value: dict[str, Any]) -> Any:
        reference = self._text(value["c"])
        cls = find_listed_class(reference) or find_loaded_class(reference)
        if cls is None and reference in STOOD_FOR and "v" in value:
            if self._stand_ins is not None:
                return self._stand_ins.member(reference, self.decode(value["v"]))
            self._warn_of(reference, "its value takes its place")
            return self.decode(value["v"])
        if cls is None or not issubclass(cls, enum.Enum):
            if "n" not in value:
                hint = "" if cls is not None else "; if it is an enum, import its module first"
                raise self._unsupported(_not_listed(reference) + hint)
            raise self._unsupported(
                f"the enum class {reference} is not imported here; import its module before loading"
            )
        found: Any
        if "n" in value:
            name = self._text(value["n"])
            found = type.__getattribute__(cls, "_member_map_").get(name)
        else:
            name = self.decode(value["v"])
            found = _member_of(cls, name)
        if found is None:
            raise self._unsupported(f"the enum class {reference} has no member {name!r:.100}")
        return found

    def _record(self, value: dict[str, Any]) -> Any:
        reference, attributes = self._text(value["c"]), self._pairs(value["v"])
        if not all(type(name) is str for name in attributes):
            raise self.fail("an attribute has no name")
        cls = find_listed_class(reference)
        if cls is None and reference not in STOOD_FOR:
            raise self._unsupported(
                f"{_not_listed(reference)}; torch.serialization.add_safe_globals puts it there"
            )
        cls = cls or find_loaded_class(reference)
        if cls is None:
            if self._stand_ins is not None:
                return self._stand_ins.record(reference, attributes)
            self._warn_of(reference, "a SimpleNamespace takes its place")
            return types.SimpleNamespace(**attributes)
        if not is_record_class(cls):
            raise self._unsupported(f"{reference} makes its objects by code of its own")
        # Not cls(...): no code of a class is run to make it.
        made: Any = object.__new__(cls)
        vars(made).update(attributes)
        return made

    def _warn_of(self, reference: str, what: str) -> None:
        if reference not in _warned_classes:
            _warned_classes.add(reference)
            warn(f"{self._where()}: the class {reference} is not imported here; {what}")

    def _pickle(self, value: dict[str, Any]) -> Any:
        if not self._allow_pickle:
            raise self._unsupported(
                "was saved as a pickle, which can run any code when read; torch_ckpt.load and its "
                "readers read it with allow_pickle=True, if you trust who wrote this checkpoint"
            )
        data = self._bytes(value)
        try:
            return pickle.loads(data)
        except Exception as error:  # whatever a foreign __setstate__ raises
            raise self._unsupported(f"cannot be unpickled: {error}") from error


def _not_listed(reference: str) -> str:
    return (
        f"the pickle names {reference.replace(':', '.')}, which is not on the list of what is read "
        "without running code"
    )


def _member_of(cls: Any, value: Any) -> Any:
    """The member of an enum that has this value; None if there is none. Of the class's own code
    nothing is run, but for what flags say of several of their values."""
    found = type.__getattribute__(cls, "_value2member_map_").get(value)
    own = vars(enum.Flag)["_missing_"].__func__
    missing = getattr(type.__getattribute__(cls, "_missing_"), "__func__", None)
    if found is None and type(value) is int and issubclass(cls, enum.Flag) and missing is own:
        try:
            found = cls(value)
        except ValueError:
            return None
    return found


_PLAIN = frozenset({type(None), bool, int, float})


@functools.lru_cache(maxsize=256)
def _plain_namedtuple(name: str, fields: tuple[str, ...]) -> type:
    """A named tuple class; collections.namedtuple refuses names that are not identifiers. Fields as
    `_1` are those of a class that was made with rename=True."""
    cls = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]
    if cls._fields != fields:
        raise ValueError(f"fields {fields!r:.200}")
    return cls


def _entry(
    members: str, handler: Callable[[Decoder, dict[str, Any]], Any]
) -> tuple[frozenset[frozenset[str]], Callable[[Decoder, dict[str, Any]], Any]]:
    """`members`: "data" stands for either "b" or "at", and "|" for another set of members."""
    sets: set[frozenset[str]] = set()
    for each in members.split("|"):
        names = each.split()
        for data in ("b", "at") if "data" in names else ("",):
            sets.add(frozenset([TAG, *(data if name == "data" else name for name in names)]))
    return frozenset(sets), handler


# Tag -> the members it must have beside "$", and its reader.
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
    "namespace": _entry("t v", Decoder._namespace),
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
    "generator": _entry("d data", Decoder._generator),
    "layout": _entry("v", Decoder._layout),
    "memory_format": _entry("v", Decoder._memory_format),
    "tensor": _entry("t s g data", Decoder._tensor),
    "parameter": _entry("t s g data", Decoder._tensor),
    "npscalar": _entry("t data", Decoder._npscalar),
    "ndarray": _entry("t s o data", Decoder._ndarray),
    "enum": _entry("c n|c v|c n v", Decoder._enum),
    "record": _entry("c v", Decoder._record),
    "pickle": _entry("data", Decoder._pickle),
}


def decode_object(
    value: Any,
    path: str = "",
    *,
    allow_pickle: bool = False,
    side: bytes | memoryview = b"",
    stand_ins: StandIns | None = None,
) -> Any:
    """Return the object that `value`, as encode_object made it and JSON brought it back, describes.

    Raises CorruptObjectError where `value` breaks the grammar, UnsupportedObjectError for a pickle
    without `allow_pickle` and for an enum class that is not imported. Both name `path`.
    """
    decoder = Decoder(side, allow_pickle, path, stand_ins)
    try:
        return decoder.decode(value)
    except RecursionError as error:
        raise decoder.fail("nested too deeply") from error
