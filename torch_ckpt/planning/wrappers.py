"""Tensors that are made of others: subclasses that torch calls traceable wrappers, as torchao's
quantized weights and optimizer states are.

Such a leaf is opened like a container: the tensors that `__tensor_flatten__` names become leaves of
their own, `<fqn>.<attribute>`, so that a load fills them where they are, bit for bit. What else it
says, and the class, is put into words (`Words`), which a save keeps and a load compares: the same
bits in another class, or with another context, would be other numbers. Nothing is made of the
words: what a checkpoint says is never looked up and called.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native import operators
from torch_ckpt.native.tensors import PLAIN_TENSORS, has_elements, memory_of, same_bits
from torch_ckpt.native.torch_private import AsyncCollectiveTensor, is_wrapper, local_tensor
from torch_ckpt.planning.boxes import local_boxes
from torch_ckpt.planning.local_boxes import LocalBoxes

# Of one tensor: its class, dtype, shape, context, and the names of its inner tensors. Until ranks
# have compared them, "shared" too: digests of inner tensors of which each rank has the whole.
Words = dict[str, Any]
# Of numbers in a context that are the shape of the part that a rank has: they say that, or they
# are these numbers on all ranks. Other ranks know which.
_SHAPE_OR = "shape or"
# Fields of contexts that say where a tensor is, or is used, and nothing of its values.
_NOT_VALUES = frozenset({"device", "requires_grad"})


def is_made_of_others(value: Any) -> bool:
    """Whether it is a leaf to be opened. Asked of every leaf that is of no usual type."""
    if isinstance(value, DTensor):
        value = local_tensor(value)
    return (
        type(value) not in PLAIN_TENSORS
        and is_wrapper(value)
        and not isinstance(value, AsyncCollectiveTensor)
        and not hasattr(value, "__create_write_items__")  # it says by itself what is in it
        and has_elements(value)
        and memory_of(value) is None
    )


def inner_tensors(
    value: torch.Tensor, fqn: str, *, compared: bool = False
) -> tuple[dict[str, torch.Tensor], Words | None]:
    """The tensors that `value` is made of, by attribute, and what is to be said of it.

    Of a DTensor they are LocalBoxes, where it is sharded. A rank that has no element of it has
    none, and nothing to say.
    compared: of a sharded one also say what all ranks must have alike, for `agreed_words`.

    Raises UnsupportedError for what cannot be put into words, and where the class does not say how
    its tensors are sharded.
    """
    local = local_tensor(value) if isinstance(value, DTensor) else value
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(local, name) for name in names}
    held = _sharded(value, inner, fqn) if isinstance(value, DTensor) else inner
    if inner and not held and value.numel():
        return {}, None
    words = {
        "class": _name_of(type(local)),
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "context": _in_words(context, tuple(local.shape), fqn),
        "inner": list(names),
    }
    if compared and any(type(part) is LocalBoxes for part in held.values()):
        shared = {name: _digests(part) for name, part in held.items() if part is inner[name]}
        words["shared"] = shared
    return held, words


def agreed_words(one: Words, other: Words) -> Words:
    """What two ranks say of their parts of a tensor, as what both mean. Raises ValueError where
    that is nothing."""
    if one == other:
        return one
    context = _agreed(one["context"], other["context"])
    if any(one.get(what) != other.get(what) for what in {*one, *other} - {"context"}):
        raise ValueError
    return {**one, "context": context}


def _agreed(one: Any, other: Any) -> Any:
    if one == other:
        return one
    for said, also in ((one, other), (other, one)):
        if _is_shape_or(said):
            if also == "shape" or _is_shape_or(also):
                return "shape"
            if also == said[_SHAPE_OR]:
                return also
    if type(one) is dict and type(other) is dict and one.keys() == other.keys():
        return {name: _agreed(each, other[name]) for name, each in one.items()}
    if type(one) is list and type(other) is list and len(one) == len(other):
        return [_agreed(each, also) for each, also in zip(one, other, strict=True)]
    raise ValueError


def _is_shape_or(said: Any) -> bool:
    return type(said) is dict and said.keys() == {_SHAPE_OR}


def _digests(value: torch.Tensor) -> list[int]:
    """Of its elements, or of those of the tensors that it is made of."""
    if is_made_of_others(value):
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [digest for name in names for digest in _digests(getattr(value, name))]
    return operators.digests([value.detach().cpu()])


def check_words(fqn: str, target: Words, stored: Words) -> None:
    """Raise InvalidArgumentError where a target is not what was saved."""
    for what in ("class", "dtype", "shape", "context", "inner"):
        try:
            _agreed(target[what], stored.get(what))
        except ValueError:
            raise InvalidArgumentError(
                f"{fqn}: the target's {what} is {target[what]!s:.200}, the checkpoint's is "
                f"{stored.get(what)!s:.200}: the bits of one mean other numbers in the other"
            ) from None


def _sharded(
    value: DTensor, inner: Mapping[str, torch.Tensor], fqn: str
) -> dict[str, torch.Tensor]:
    boxes = local_boxes(value, fqn)
    local = local_tensor(value)
    if len(boxes) > 1:
        raise UnsupportedError(
            f"is {len(boxes)} separate boxes on this rank, of class {_name_of(type(local))}; "
            "redistribute it first",
            tensor=fqn,
        )
    if not boxes:
        return {}
    box = boxes[0]
    cut = [d for d, size in enumerate(box.sizes) if size != value.shape[d]]
    if not cut:
        return dict(inner)
    if 0 in box.sizes:
        return {}
    shapes = {name: list(tensor.shape) for name, tensor in inner.items()}
    offsets = {name: [0] * tensor.dim() for name, tensor in inner.items()}
    for dim in cut:
        for name, along in _follow(local, inner, dim, fqn).items():
            at, size, whole = box.offsets[dim], box.sizes[dim], value.shape[dim]
            held = inner[name].shape[along]
            twice = shapes[name][along] != held  # by another dimension, too
            if twice or at * held % size or whole * held % size:
                raise UnsupportedError(
                    f"is sharded where its {name}, of {list(inner[name].shape)} here, cannot be: "
                    f"rows {at} to {at + size} of {whole}",
                    tensor=fqn,
                )
            offsets[name][along] = at * held // size
            shapes[name][along] = whole * held // size
    return {
        name: tensor
        if shapes[name] == list(tensor.shape)
        else LocalBoxes(shapes[name], [(offsets[name], tensor)])
        for name, tensor in inner.items()
    }


def _follow(
    local: torch.Tensor, inner: Mapping[str, torch.Tensor], dim: int, fqn: str
) -> dict[str, int]:
    """The inner tensors that are sharded when `local` is along `dim`, with the dimension of each.

    The class says it: by those of a slice. They must be those elements of the whole ones that
    are in the place of the slice, or all.
    """
    start, end, piece = _piece(local, dim, fqn)
    size = local.shape[dim]
    along: dict[str, int] = {}
    for name, tensor in inner.items():
        found = getattr(piece, name)
        cut = [d for d in range(tensor.dim()) if found.shape[d] != tensor.shape[d]]
        expected = tensor
        if cut:
            at = along[name] = cut[0]
            held = tensor.shape[at]
            begin, left = start * held // size, (end - start) * held // size
            if len(cut) > 1 or left != found.shape[at]:
                raise _no_shards(name, dim, fqn)
            expected = tensor.narrow(at, begin, left)
        if not same_bits(found, expected):
            raise _no_shards(name, dim, fqn)
    return along


def _no_shards(name: str, dim: int, fqn: str) -> UnsupportedError:
    return UnsupportedError(
        f"is sharded along dimension {dim}, and no dimension of its {name} is cut alike",
        tensor=fqn,
    )


def _piece(local: torch.Tensor, dim: int, fqn: str) -> tuple[int, int, torch.Tensor]:
    """A slice of `local` along `dim`, from where to where: the last half, third, ... that its class
    takes, whose blocks may be longer than a row; or nothing of it."""
    size = local.shape[dim]
    count = [size // n for n in range(2, size + 1) if size % n == 0]
    why: Exception | None = None
    for start, end in [*((size - n, size) for n in count), (0, 0)]:
        try:
            return start, end, _slice(local, dim, start, end)
        except Exception as error:  # whatever a class raises
            why = why or error
    raise UnsupportedError(
        f"is sharded along dimension {dim}, which its class {_name_of(type(local))} cannot be: "
        f"{why}",
        tensor=fqn,
    ) from why


def _slice(value: torch.Tensor, dim: int, start: int, end: int) -> torch.Tensor:
    with torch.no_grad():
        return value.narrow(dim, start, end - start)


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _in_words(value: Any, shape: tuple[int, ...], fqn: str) -> Any:
    """A context as dicts, lists, text and numbers, equal for what means the same."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{_name_of(kind)}.{value.name}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": _name_of(kind), **_fields(value._asdict(), shape, fqn)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {"class": _name_of(kind), **_fields(fields, shape, fqn)}
    if isinstance(value, list | tuple):  # torch.Size among them
        if shape and all(isinstance(each, int) for each in value) and tuple(value) == shape:
            return {_SHAPE_OR: [int(each) for each in value]}
        return [_in_words(each, shape, fqn) for each in value]
    if isinstance(value, Mapping) and all(type(key) is str and key != _SHAPE_OR for key in value):
        return _fields(value, shape, fqn)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        if "<" not in value.__qualname__:  # a lambda, or local to a function
            return _name_of(value)
    raise UnsupportedError(
        f"its context holds a {_name_of(kind)}, which cannot be kept in words", tensor=fqn
    )


def _fields(value: Mapping[str, Any], shape: tuple[int, ...], fqn: str) -> dict[str, Any]:
    return {
        name: _in_words(each, shape, fqn) for name, each in value.items() if name not in _NOT_VALUES
    }
