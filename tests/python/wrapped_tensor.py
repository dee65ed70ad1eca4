"""A subclass of Tensor that is made of another tensor, as torchao's are."""

from __future__ import annotations

from typing import Any

import torch


class Wrapped(torch.Tensor):
    """A tensor that is made of another one."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: float) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner, made.scale = inner, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], scale: float, size: Any, stride: Any
    ) -> Wrapped:
        return Wrapped(inner["inner"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")
