"""Merges of loaded parts without a copy: torch.cat of tensors that lie in a row in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CATS = frozenset({torch.cat, torch.concat, torch.concatenate})


class ViewsForCat(TorchFunctionMode):
    """Within it torch.cat of what lies in a row gives that memory: the parts of a tensor that a
    factory has split, as SwiGLU's, were loaded in their places."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[tuple[torch.Tensor, int]] = []  # of such memory, and their versions

    def parts_have_changed(self) -> bool:
        """Whether a part was written into after it was put in a row: so was what torch.cat gave,
        which is to be a copy."""
        return any(part._version != version for part, version in self._parts)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _CATS and not keywords.keys() - {"tensors", "dim", "axis"}:
            tensors = args[0] if args else keywords.get("tensors")
            dim = args[1] if len(args) > 1 else keywords.get("dim", keywords.get("axis", 0))
            view = in_a_row(tensors, dim)
            if view is not None:
                self._parts.extend((part, part._version) for part in tensors or ())
                return view
        return func(*args, **keywords)


def in_a_row(tensors: Any, dim: Any) -> torch.Tensor | None:
    """The view of one memory that `torch.cat(tensors, dim)` equals, if there is one."""
    if not isinstance(tensors, list | tuple) or not tensors or type(dim) is not int:
        return None
    first: torch.Tensor = tensors[0]
    if not all(type(each) is torch.Tensor and _is_alike(each, first) for each in tensors):
        return None
    dims = first.dim()
    # Those of inference_mode have no versions.
    if not -dims <= dim < dims or first.requires_grad or first.is_inference():
        return None
    dim %= dims
    length = _length_in_a_row(tensors, dim)
    if length is None:
        return None
    sizes = list(first.shape)
    sizes[dim] = length
    # `data` has versions of its own: it may be written into, the parts may not.
    return first.as_strided(sizes, first.stride(), first.storage_offset()).data


def _is_alike(each: torch.Tensor, first: torch.Tensor) -> bool:
    return (
        each.layout is torch.strided
        and each.dtype == first.dtype
        and each.device == first.device
        and each.dim() == first.dim() > 0
        and each.stride() == first.stride()
        and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and not (each.is_conj() or each.is_neg())
    )


def _length_in_a_row(tensors: Sequence[torch.Tensor], dim: int) -> int | None:
    first = tensors[0]
    length = 0
    for each in tensors:
        others = [size for axis, size in enumerate(each.shape) if axis != dim]
        if others != [size for axis, size in enumerate(first.shape) if axis != dim]:
            return None
        if each.storage_offset() != first.storage_offset() + length * first.stride(dim):
            return None
        length += each.shape[dim]
    return length
