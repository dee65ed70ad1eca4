"""A tensor that is made of others in the way of torchao's optimizer states of 8 bits: codes of its
shape, a scale for each block of 16 of them, and a table that all of it shares."""

from __future__ import annotations

import math
from typing import Any

import torch

BLOCK = 16


class Blocked(torch.Tensor):
    """signed: what the codes mean."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, signed: bool = True
    ) -> Blocked:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.table, made.signed = codes, scale, table, signed
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale", "table"], {"signed": self.signed, "device": self.codes.device}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Blocked:
        return cls(inner["codes"], inner["scale"], inner["table"], context["signed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self = args[0]
        if func is torch.ops.aten.slice.Tensor:
            return cls.part(*args)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            assert func is torch.ops.aten.detach.default or list(args[1]) == list(self.shape)
            return cls(self.codes, self.scale, self.table, self.signed)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise AssertionError(f"{func} was called")

    @classmethod
    def part(cls, whole: Blocked, dim: int = 0, start: int = 0, end: int = 0) -> Blocked:
        row = math.prod(whole.shape[1:])
        if dim != 0 or start * row % BLOCK or end * row % BLOCK:
            raise ValueError(f"no block ends at {start} or {end} of dimension {dim}")
        scale = whole.scale[start * row // BLOCK : end * row // BLOCK]
        return cls(whole.codes[start:end], scale, whole.table.clone(), whole.signed)


class Filled(Blocked):
    """Its class knows no empty slices, as torchao's, which divide by what is in them."""

    @classmethod
    def part(cls, whole: Blocked, dim: int = 0, start: int = 0, end: int = 0) -> Blocked:
        if start == end:
            raise ZeroDivisionError("no blocks")
        return super().part(whole, dim, start, end)


class Rows(Blocked):
    """Its context has the shape of its blocks, as torchao's float8 weights with a scale a row: that
    of a part of one row is the same."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names, context = super().__tensor_flatten__()
        return names, {**context, "block": [min(1, self.shape[0]), self.shape[1]]}


class Mixed(Blocked):
    """Its slices have elements of other places."""

    @classmethod
    def part(cls, whole: Blocked, dim: int = 0, start: int = 0, end: int = 0) -> Blocked:
        made = super().part(whole, dim, start, end)
        made.scale = whole.scale.flip(0)[: len(made.scale)]
        return made


class Halting(Blocked):
    """Its class cannot be sliced."""

    @classmethod
    def part(cls, *_: Any) -> Blocked:
        raise NotImplementedError("no slices")


def blocked(rows: int, seed: int, columns: int = 48, kind: type[Blocked] = Blocked) -> Blocked:
    of = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=of)
    scale = torch.rand(rows * columns // BLOCK, generator=of)
    return kind(codes, scale, torch.linspace(-1, 1, 256))


def zeros_like(value: Blocked) -> Blocked:
    """A target for it, with nothing of it."""
    parts = (torch.zeros_like(value.codes), torch.zeros_like(value.scale))
    return type(value)(*parts, torch.zeros_like(value.table), value.signed)


def same(value: Any, other: Any) -> bool:
    """Whether all of their bits are."""
    names, context = value.__tensor_flatten__()
    return (
        type(value) is type(other)
        and (names, context) == other.__tensor_flatten__()
        and all(torch.equal(getattr(value, name), getattr(other, name)) for name in names)
    )
