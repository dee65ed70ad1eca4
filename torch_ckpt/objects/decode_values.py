"""The half of the decoder that reads values without members: numbers, text, bytes, dates, tensors,
arrays. decode.py has the rules of the whole."""

from __future__ import annotations

import abc
import base64
import binascii
import ctypes
import datetime
import decimal
import fractions
import io
import math
import re
import struct
import uuid
from typing import Any

import torch

from torch_ckpt.objects.types import (
    DTYPES,
    LAYOUTS,
    MAX_DIMENSIONS,
    MAX_PLAIN_INT,
    MEMORY_FORMATS,
    PATHS,
    TAG,
    CorruptObjectError,
    UnsupportedObjectError,
)

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_NUMPY_CODE = re.compile(
    r"[<>|=](b1|[iu][1248]|[qQ]|f(2|4|8|12|16)|c(8|16|24|32)|[SU][0-9]{1,9}"
    r"|[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


_MT19937 = struct.Struct("<QiiQ")  # of torch's: the seed, numbers left, whether seeded, the next
_MT19937_NUMBERS = 624


def _is_state_of_mt19937(state: bytearray) -> bool:
    """Whether it begins as one. Torch does not look, and would read behind the last number."""
    if len(state) < _MT19937.size:
        return False
    _, left, seeded, place = _MT19937.unpack_from(state)
    used = left + place == _MT19937_NUMBERS + 1 and 0 < left <= _MT19937_NUMBERS
    return seeded == 1 and (used or (left, place) == (1, 0))


def _name_text(name: Any) -> str:
    """A path component for messages, short; no code of a class is run to say a key."""
    if type(name) is str:
        return name[:200].encode("utf-8", "backslashreplace").decode("utf-8")
    plain = type(name) is int and -MAX_PLAIN_INT <= name <= MAX_PLAIN_INT
    return str(name) if plain else f"({type(name).__name__})"


class ValueDecoder(abc.ABC):
    """Not for several threads. Side bytes may be used once in total, so that a small file cannot
    expand into much memory."""

    def __init__(self, side: bytes | memoryview, allow_pickle: bool, path: str = "") -> None:
        self.path = path
        self._side = memoryview(side)
        self._side_left = len(self._side)
        self._allow_pickle = allow_pickle
        self._names: list[Any] = []  # of what is decoded, in each container that it is in

    @abc.abstractmethod
    def decode(self, value: Any) -> Any:
        """Return the object that `value` describes. Raises ObjectError."""

    @abc.abstractmethod
    def _items(self, value: Any) -> list[Any]:
        """Decode the members of a list, one level deeper."""

    def _unicode(self, text: str) -> str:
        """Text that JSON says; surrogates have a tag of their own."""
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise self.fail("text with a surrogate") from None
        return text

    def fail(self, why: str) -> CorruptObjectError:
        return CorruptObjectError(f"{self._where()}: malformed object: {why}")

    def _unsupported(self, why: str) -> UnsupportedObjectError:
        return UnsupportedObjectError(f"{self._where()}: {why}")

    def _where(self) -> str:
        """The path of what is decoded, for messages."""
        names = [self.path] if self.path else []
        names += [_name_text(name) for name in self._names if name is not None]
        where = ".".join(names) or "(object)"
        return where if len(where) <= 1000 else f"{where[:500]}...{where[-500:]}"

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
        return self._ints(self._parts(value), count)

    def _parts(self, value: Any) -> list[Any]:
        """The values that make one scalar: no container, so none of those that are counted."""
        if type(value) is not list:
            raise self.fail(f"expected a list, found {type(value).__name__}")
        return [self.decode(part) for part in value]

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
        if len(shape) > MAX_DIMENSIONS or any(not 0 <= size < 2**63 for size in shape):
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
        parts = self._parts(value["v"])
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

    def _generator(self, value: dict[str, Any]) -> torch.Generator:
        device = torch.device(self._text(value["d"]))
        state = bytearray(self._bytes(value))
        if device.type == "cpu" and not _is_state_of_mt19937(state):
            raise self.fail("a random number generator whose state cannot be")
        try:
            generator = torch.Generator(device)
        except RuntimeError as error:
            raise self._unsupported(
                f"a random number generator of {device}, which this process cannot make: {error}"
            ) from error
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        return generator

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
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
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
        # An element of an array would lose the NULs at its end.
        if dtype.kind == "S":
            return dtype.type(data)
        if dtype.kind == "U":
            order = "be" if dtype.str.startswith(">") else "le"
            return dtype.type(data.decode(f"utf-32-{order}", "surrogatepass"))
        return numpy.ndarray((), dtype, data)[()]

    def _ndarray(self, value: dict[str, Any]) -> Any:
        numpy, dtype = self._numpy_dtype(value["t"])
        if value["o"] not in ("C", "F"):
            raise self.fail("an array whose order is neither C nor F")
        data = self._bytes(value)
        shape = self._shape(value["s"], dtype.itemsize, len(data))
        return numpy.ndarray(shape, dtype, bytearray(data), order=value["o"])
