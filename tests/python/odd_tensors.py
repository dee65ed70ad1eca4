"""Tensors whose elements are not where their address says, or nowhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Coded(torch.Tensor):
    """Halves, kept as int8: made of another tensor, as quantized weights are, and with its own
    `copy_`. Other operators see a plain copy."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Coded:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Coded):
            return cls.set(args[0], args[1])
        plain = torch.utils._pytree.tree_map(
            lambda value: value.codes / 2 if isinstance(value, Coded) else value, args
        )
        return func(*plain, **(kwargs or {}))

    @staticmethod
    def set(into: Coded, value: torch.Tensor) -> Coded:
        into.codes.copy_((value * 2).to(torch.int8))
        return into


class Deaf(Coded):
    """Its `copy_` is one operator of many, and changes a plain copy."""

    @staticmethod
    def set(into: Coded, value: torch.Tensor) -> Coded:
        (into.codes / 2).copy_(value)
        return into


class Grumpy(Coded):
    """It has no `copy_`."""

    @staticmethod
    def set(into: Coded, value: torch.Tensor) -> Coded:
        raise NotImplementedError("no copy_")


def codes(count: int = 8) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int8)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(8)


def _quiet(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def made() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototypes, and what torch will drop
            return make()

    return made


HALVES = [torch.ones(5), torch.ones(3)]
# Of eight elements, by what an error says of them.
ODD: dict[str, Callable[[], torch.Tensor]] = {
    name: _quiet(make)
    for name, make in {
        "an UninitializedParameter": nn.UninitializedParameter,
        "an UninitializedBuffer": nn.UninitializedBuffer,
        "on the meta device": lambda: torch.empty(8, device="meta"),
        "a fake tensor": fake,
        "a nested tensor": lambda: torch.nested.nested_tensor(HALVES),
        "nested tensor": lambda: torch.nested.nested_tensor(HALVES, layout=torch.jagged),
        "MaskedTensor": lambda: torch.masked.masked_tensor(torch.ones(8), torch.ones(8) > 0),
        "sparse_coo": lambda: torch.ones(8).to_sparse(),
        "_mkldnn": lambda: torch.ones(8).to_mkldnn(),
        "qint8": lambda: torch.quantize_per_tensor(torch.ones(8), 0.5, 0, torch.qint8),
        "odd_tensors.Coded": lambda: Coded(codes()),
        "complex128": lambda: torch.ones(8, dtype=torch.complex128),
    }.items()
}
