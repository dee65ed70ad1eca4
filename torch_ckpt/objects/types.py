"""What the encoder and the decoder of object leaves share: limits, tables, errors, class look-up.

The grammar is in docs/format.md, section "Objects file".
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.errors import CheckpointError, CorruptError, UnsupportedError

FORMAT_VERSION = 1
# Containers inside containers. Keeps both directions far from Python's recursion limit.
MAX_DEPTH = 100
# Bytes of one leaf that may stand in the JSON text (before base64); what follows goes to the side
# file, so that the JSON stays small enough to be read whole.
MAX_INLINE_BYTES = 64 * 1024
# Integers beyond this are written as hexadecimal text: Python refuses decimal text of more than
# sys.get_int_max_str_digits() digits, and conversion from decimal takes quadratic time.
MAX_PLAIN_INT = 2**63 - 1
MAX_DIMENSIONS = 64  # of a tensor or an array
# The key that marks a tagged object.
TAG = "$"


class ObjectError(CheckpointError, TypeError):
    """An object leaf that cannot be written or read; the message starts with its path."""


class UnsupportedObjectError(ObjectError, UnsupportedError):
    """The object is of a type that the objects file cannot say, or that this process lacks."""


class CorruptObjectError(ObjectError, CorruptError):
    """The bytes of an objects file break its grammar."""


def _torch_constants(kind: type) -> dict[str, Any]:
    """Public names in `torch` whose value is of exactly `kind`, e.g. {"float32": torch.float32}."""
    found: dict[str, Any] = {}
    for value in vars(torch).values():
        if type(value) is kind:
            found[str(value).removeprefix("torch.")] = value
    return found


DTYPES: dict[str, torch.dtype] = _torch_constants(torch.dtype)
LAYOUTS: dict[str, torch.layout] = _torch_constants(torch.layout)
MEMORY_FORMATS: dict[str, torch.memory_format] = _torch_constants(torch.memory_format)

PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}

NAMESPACES: dict[str, type] = {
    "argparse": argparse.Namespace,
    "simple": types.SimpleNamespace,
}

# The only default_factory values of a defaultdict that are written: calling them runs no code of
# the checkpoint's author.
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{
        cls.__name__: cls
        for cls in (
            bool,
            bytearray,
            bytes,
            complex,
            dict,
            float,
            frozenset,
            int,
            list,
            set,
            str,
            tuple,
            OrderedDict,
        )
    },
}

# Classes of Megatron's that its checkpoints name, enums and records: where one is not imported, a
# value, or a SimpleNamespace, takes the place of what it would be.
STOOD_FOR = frozenset(
    {
        *(f"megatron.core.enums:{name}" for name in ("ModelType", "Fp8Recipe", "Fp4Recipe")),
        *(
            f"megatron.core.transformer.enums:{name}"
            for name in (
                *("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend"),
                *("CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"),
            )
        ),
        *(
            f"megatron.core.rerun_state_machine:{name}"
            for name in ("RerunDiagnostic", "RerunMode", "RerunState")
        ),
        "megatron.core.optimizer.optimizer_config:OptimizerConfig",
    }
)

MICROSECOND = datetime.timedelta(microseconds=1)


def torch_name(value: Any) -> str:
    """The name of a torch constant without the leading "torch."."""
    return str(value).removeprefix("torch.")


def is_namedtuple_class(cls: type) -> bool:
    """True for classes made by collections.namedtuple or typing.NamedTuple and their subclasses."""
    if cls is tuple or not issubclass(cls, tuple):
        return False
    # In dictionaries, as find_loaded_class does: no code of a class or its metaclass is run.
    fields = None
    for base in type.__dict__["__mro__"].__get__(cls):
        namespace = type.__dict__["__dict__"].__get__(base)
        if "_fields" in namespace:
            fields = namespace["_fields"]
            break
    return type(fields) is tuple and all(type(name) is str for name in fields)


def class_reference(cls: type) -> str:
    """How a class is named in the file: "module:qualified.name"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_listed_class(reference: str) -> type | None:
    """The class that this process lists under that name by torch.serialization.add_safe_globals."""
    name = reference.replace(":", ".")
    for entry in torch.serialization.get_safe_globals():
        cls, alias = entry if isinstance(entry, tuple) else (entry, "")
        if isinstance(cls, type) and name == (alias or f"{cls.__module__}.{cls.__qualname__}"):
            return cls
    return None


class _Plain:
    """What any class is that adds nothing."""


# By which a class makes, tells, ends or shows its objects itself.
_OWN_WAYS = frozenset(
    {
        *("__new__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__"),
        *("__reduce__", "__reduce_ex__", "__del__", "__getattribute__"),
    }
)


def is_record_class(cls: type) -> bool:
    """Whether its objects are their attributes: pickle makes them by no code of the class, and
    nothing of them is anywhere else."""
    ways = (_OWN_WAYS.intersection(vars(base)) for base in cls.__mro__ if base is not object)
    return _memory_of(cls) == _memory_of(_Plain) and not any(ways)


def _memory_of(cls: type) -> tuple[int, ...]:
    """What an object has beside its attributes, in slots or of the interpreter's."""
    return cls.__basicsize__, cls.__itemsize__, cls.__dictoffset__, cls.__weakrefoffset__


def find_loaded_class(reference: str) -> type | None:
    """Return the class that `reference` names if its module is already imported, else None.

    Looks only into dictionaries (sys.modules, the module's, outer classes'), so that neither an
    import nor a module's or class's own __getattr__ can run because of a file's content.
    """
    module_name, colon, qualname = reference.partition(":")
    module = sys.modules.get(module_name)
    if not colon or not issubclass(type(module), types.ModuleType):
        return None
    namespace: Any = object.__getattribute__(module, "__dict__")
    found: Any = None
    for name in qualname.split("."):
        if name not in namespace:
            return None
        found = namespace[name]
        if not issubclass(type(found), type):
            return None
        namespace = type.__dict__["__dict__"].__get__(found)
    return found if isinstance(found, type) else None
