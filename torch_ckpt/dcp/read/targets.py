"""Targets of a load: which can be filled, how they are where the engine cannot, and which of them
are one memory.

Threads fill targets at the same time. Of two names for one memory the bytes of either would be left
to chance, piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native.tensors import (
    has_elements,
    keeps_its_own,
    memory_of,
    same_bits,
    what_is_wrong,
)
from torch_ckpt.native.torch_private import own_word

_MOST_STEPS = 100_000  # to prove that two targets share nothing


def check_target(target: torch.Tensor, name: str) -> torch.Tensor:
    """`target`, if a load can fill it in any way. Raises UnsupportedError."""
    if memory_of(target) is None and not keeps_its_own(target):
        wrong = what_is_wrong(target)
        if has_elements(target):  # it is sparse, or the like
            wrong = f"is {target.layout}: load into a dense tensor"
        raise UnsupportedError(f"its target {wrong}", tensor=name)
    return target


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy and cast. To a CUDA device the copy may still run on return."""
    # Tensors of that mode take nothing outside of it.
    with torch.no_grad(), torch.inference_mode(target.is_inference()):
        if target.is_cuda:
            # A cast on the host would take pageable memory of its own.
            value = (
                value.to(target.device, non_blocking=True) if value.dtype != target.dtype else value
            )
            target.copy_(value, non_blocking=True)
        else:
            target.copy_(value)


def copy_by_itself(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Let a `target` that `keeps_its_own` elements take those of `value`, a plain CPU tensor.

    Raises UnsupportedError where it cannot, or where nothing comes of it: to some classes `copy_`
    is one more operator that they give a plain copy of themselves.
    """
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    before = [part.clone() for part in _parts(target)]
    try:
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            into = target.detach() if target.requires_grad else target
            # What it was before may be the right values, or all that it ever is.
            for make in (lambda _: value, torch.zeros_like, torch.ones_like):
                each = make(value)
                into.copy_(each)
                if not before or not value.numel() or not same_parts(before, _parts(target)):
                    if each is not value:
                        into.copy_(value)
                    return
    except Exception as error:
        raise UnsupportedError(
            f"its target, of class {kind}, does not take a plain tensor: {error}", tensor=name
        ) from error
    raise UnsupportedError(
        f"its target, of class {kind}, does not take a plain tensor: its copy_ changes nothing; "
        "load into a plain tensor, and make it of that",
        tensor=name,
    )


def check_places(target: torch.Tensor, name: str) -> None:
    """Raises InvalidArgumentError where elements of a strided target are one place in memory, and
    the last would be left of each."""
    if target.numel() and any(
        n > 1 and not step for n, step in zip(target.shape, target.stride(), strict=True)
    ):
        raise InvalidArgumentError(
            "the target is expanded: several of its elements are one place in memory", tensor=name
        )


def memories_of(target: torch.Tensor) -> list[torch.Tensor]:
    """Plain strided tensors in the memory of a target, as far as it shows what it is made of."""
    memory = memory_of(target)
    if memory is not None:
        return [memory]
    return [_codes_of(target)] if own_word(target, "is_quantized") else _parts(target)


def _codes_of(quantized: torch.Tensor) -> torch.Tensor:
    storage: Any = quantized.untyped_storage()
    dtype = torch.int32 if quantized.element_size() == 4 else torch.uint8
    codes = torch.empty(0, dtype=dtype, device=quantized.device)
    if quantized.dtype in (torch.quint4x2, torch.quint2x4):  # several in a byte
        return codes.set_(storage)
    return codes.set_(storage, quantized.storage_offset(), quantized.size(), quantized.stride())


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The memories of the tensors that one shows as its attributes."""
    return [
        memory
        for part in vars(value).values()
        if isinstance(part, torch.Tensor)
        for memory in memories_of(part)
    ]


def same_parts(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
        for a, b in zip(before, after, strict=True)
    )


def find_shared(
    names: Sequence[str], parts: Sequence[Sequence[torch.Tensor]]
) -> list[dict[int, torch.Tensor]]:
    """Memories that several targets have in common, as the part of each by its number; `parts` are
    those of each target.

    Raises what `find_tied` does.
    """
    owned = [(number, part) for number, each in enumerate(parts) for part in each]
    tied = find_tied([names[number] for number, _ in owned], [part for _, part in owned])
    shared = (dict(owned[at] for at in group) for group in tied)
    return [each for each in shared if len(each) > 1]


# From the first to behind the last byte of a target, and its number.
_Span = tuple[int, int, int]


class _Nest(NamedTuple):
    """Bytes of a strided tensor: runs of `run` bytes, repeated along `dims`, (count, stride) from
    the largest stride down."""

    begin: int
    run: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.begin + self.run + sum((count - 1) * stride for count, stride in self.dims)


def find_tied(names: Sequence[str], targets: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of `targets` that are the same bytes, group by group; none as a rule.

    Raises InvalidArgumentError, naming both, for targets of different names of which one is a part
    of the other, or shares a part with it. Different boxes of one name are taken for disjoint.
    """
    spans: list[_Span] = []
    for number, target in enumerate(targets):
        size = target.nbytes
        if size:
            begin = target.data_ptr()
            if target.is_contiguous():
                spans.append((begin, begin + size, number))
            else:
                spans.append((begin, _nest(target).end, number))
    spans.sort()
    if all(end <= begin for (_, end, _), (begin, _, _) in pairwise(spans)):
        return []  # as a rule
    tied: list[list[int]] = []
    reach = 0
    beside: list[_Span] = []  # that a chain of common addresses holds together
    for span in spans:
        if span[0] >= reach:
            tied += _tied_of(beside, names, targets)
            beside = []
        beside.append(span)
        reach = max(reach, span[1])
    return tied + _tied_of(beside, names, targets)


def _tied_of(
    spans: list[_Span], names: Sequence[str], targets: Sequence[torch.Tensor]
) -> list[list[int]]:
    if len(spans) < 2:
        return []
    same: dict[object, list[int]] = {}
    for _, _, number in spans:
        target = targets[number]
        # Whatever their dtypes, and the order of their dimensions.
        same.setdefault((target.device, _nest(target)), []).append(number)
    groups = list(same.values())
    if len(groups) > 1:
        _check_apart([group[0] for group in groups], names, targets)
    return [sorted(group) for group in groups if len(group) > 1]


def _check_apart(numbers: list[int], names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
    """`numbers` are of targets that are not the same bytes, in the order of their addresses."""
    nests = [_nest(targets[number]) for number in numbers]
    if _take_turns(nests):
        return
    for at, (number, nest) in enumerate(zip(numbers, nests, strict=True)):
        for other, before in zip(numbers[:at], nests, strict=False):
            if names[number] == names[other] or before.end <= nest.begin:
                continue
            if targets[number].device != targets[other].device or _take_turns([nest, before]):
                continue
            if _meet(nest, before, [_MOST_STEPS]):
                first, second = sorted((number, other))
                raise InvalidArgumentError(
                    f"its target shares a part of its memory with that of '{names[first]}': load "
                    "into one of them, or into a copy",
                    tensor=names[second],
                )


def _nest(target: torch.Tensor) -> _Nest:
    item = target.element_size()
    dims = sorted(
        (
            (step * item, size)
            for size, step in zip(target.shape, target.stride(), strict=True)
            if size > 1 and step
        ),
    )
    run = item
    outer: list[tuple[int, int]] = []  # count, stride; the smallest stride first
    for stride, count in dims:
        if not outer and stride == run:
            run *= count
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * count, outer[-1][1])
        else:
            outer.append((count, stride))
    return _Nest(target.data_ptr(), run, tuple(reversed(outer)))


def _take_turns(nests: list[_Nest]) -> bool:
    """Whether all strides are multiples of a period in which each has bytes of its own, as the
    columns of a matrix have."""
    period = math.gcd(*(stride for nest in nests for _, stride in nest.dims))
    places = sorted((nest.begin % period, nest.run) for nest in nests) if period else []
    if not places:
        return False
    first, last = places[0], places[-1]
    return last[0] + last[1] <= first[0] + period and all(
        at + run <= following for (at, run), (following, _) in pairwise(places)
    )


def _meet(a: _Nest, b: _Nest, steps: list[int]) -> bool:
    """Whether a byte is in both; whether it may be, after that many steps."""
    if a.end <= b.begin or b.end <= a.begin:
        return False
    steps[0] -= 1
    if steps[0] < 0 or not (a.dims or b.dims):
        return True
    if not a.dims or (b.dims and b.end - b.begin > a.end - a.begin):
        a, b = b, a
    (count, stride), *inner = a.dims
    half = count // 2
    return any(
        _meet(_Nest(begin, a.run, _dims(n, stride, inner)), b, steps)
        for begin, n in ((a.begin, half), (a.begin + half * stride, count - half))
    )


def _dims(count: int, stride: int, inner: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return ((count, stride), *inner) if count > 1 else tuple(inner)
