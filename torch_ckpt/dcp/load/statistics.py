"""Numbers about stored tensors, which are read in pieces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch

from torch_ckpt.dcp.load.stored import StoredTensor, read_together

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
PIECE_BYTES = 32 << 20  # of a tensor, at most, held at once


def pieces(
    shape: torch.Size, itemsize: int, most: int = PIECE_BYTES
) -> Iterator[tuple[slice, ...]]:
    """Indices that take a tensor apart into boxes of at most `most` bytes, or of one element."""
    if shape.numel() * itemsize <= most or all(size == 1 for size in shape):
        yield tuple(slice(0, size) for size in shape)
        return
    dim = next(d for d, size in enumerate(shape) if size > 1)
    count = max(1, most * shape[dim] // (shape.numel() * itemsize))
    for begin in range(0, shape[dim], count):
        end = min(shape[dim], begin + count)
        part = torch.Size([*shape[:dim], end - begin, *shape[dim + 1 :]])
        for inner in pieces(part, itemsize, most):
            moved = slice(begin + inner[dim].start, begin + inner[dim].stop)
            yield (*inner[:dim], moved, *inner[dim + 1 :])


def statistics_of(
    stored: StoredTensor, read: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """{"min", "max", "mean", "nan", "inf"}: of the finite elements, and how many are not numbers or
    not finite. None for what a dtype does not have, and of no elements. Complex numbers are counted
    only; so are packed ones, which torch cannot compute with. `read` is called with the bytes of
    each piece that was read."""
    answer: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "nan", "inf"))
    dtype = stored.dtype
    if dtype == _FLOAT4:
        return answer
    floating = dtype.is_floating_point or dtype.is_complex
    count, total = 0, Fraction(0)  # a sum may be too large for a float64
    nan = inf = 0
    # Sums of pieces are of float64, which holds every integer up to 2^53.
    for piece in _read_in_parts(stored, read):
        if dtype.itemsize == 1 and floating:
            piece = piece.to(torch.float32)  # float8 lacks kernels
        if floating:
            nan += int(torch.isnan(piece).sum())
            inf += int(torch.isinf(piece).sum())
            piece = piece[torch.isfinite(piece)]
        if dtype.is_complex or not piece.numel():
            continue
        ordered, shift = piece, 0
        if dtype in (torch.uint16, torch.uint32, torch.bool):
            ordered = piece = piece.to(torch.int64)
        elif dtype == torch.uint64:
            ordered, shift = _shifted(piece), 1 << 63
            piece = piece.to(torch.float64)
        least, largest = (each.item() + shift for each in (ordered.min(), ordered.max()))
        answer["min"] = least if answer["min"] is None else min(answer["min"], least)
        answer["max"] = largest if answer["max"] is None else max(answer["max"], largest)
        count += piece.numel()
        total += _sum(piece)
    if count:
        with contextlib.suppress(OverflowError):  # it rounds to infinity
            answer["mean"] = float(total / count)
    if floating:
        answer.update(nan=nan, inf=inf)
    return answer


def _sum(piece: torch.Tensor) -> Fraction:
    total = float(piece.sum(dtype=torch.float64))
    if math.isfinite(total):
        return Fraction(total)
    return 2**64 * Fraction(float((piece.to(torch.float64) * 2.0**-64).sum()))


def _read_in_parts(stored: StoredTensor, read: Callable[[int], None]) -> Iterator[torch.Tensor]:
    """All elements, in flat parts so small that what is computed of one takes little memory."""
    for index in pieces(stored.shape, stored.dtype.itemsize):
        piece = stored[index].contiguous().view(-1)
        read(piece.nbytes)
        yield from piece.split(max(1, PIECE_BYTES // _BYTES_TO_COMPARE))


def differences(
    pairs: Iterable[tuple[StoredTensor, StoredTensor]],
    rtol: float,
    atol: float,
    *,
    budget: int = 16 * PIECE_BYTES,
    read: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[int, float]]:
    """Of each pair how many elements differ, and by how much at most. REQUIRES: the shapes of a
    pair are equal, all first ones are of one checkpoint, and so are all second ones.

    Without tolerances and of one dtype elements are compared bit by bit, so that a NaN equals
    itself; else as integers, or as float64, where |a - b| <= atol + rtol * |b| counts as equal, and
    so do two NaNs. The second is 0.0 where only the bits differ, and NaN where one of two is a NaN.

    budget: bytes of memory that this takes at most, from 64 MiB on. read: is called with the bytes
    that were compared, again and again.
    """
    # Two pieces are an eighth of the budget at most, and so is what is computed of a part of them;
    # the core reads through buffers of its own, of 32 MiB at most.
    most = min(PIECE_BYTES // 2, budget // 16)
    part = max(1, most // _BYTES_TO_COMPARE)
    together: list[tuple[StoredTensor, StoredTensor]] = []  # small ones, read by one call
    size = 0

    def flush() -> Iterator[tuple[int, float]]:
        lefts, rights = (read_together([pair[side] for pair in together]) for side in (0, 1))
        for left, right in zip(lefts, rights, strict=True):
            read(left.nbytes + right.nbytes)
            yield _compared(left, right, rtol, atol, part)
        together.clear()

    for a, b in pairs:
        itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
        bytes_of_it = a.shape.numel() * itemsize
        if together and (size + bytes_of_it > most or len(together) >= _MOST_TOGETHER):
            yield from flush()
            size = 0
        if bytes_of_it <= most:
            together.append((a, b))
            size += bytes_of_it
            continue
        count, largest = 0, 0.0
        for index in pieces(a.shape, itemsize, most):
            left, right = a[index], b[index]
            read(left.nbytes + right.nbytes)
            number, apart = _compared(left, right, rtol, atol, part)
            count += number
            largest = _larger(apart, largest)
        yield count, largest
    yield from flush()


_MOST_TOGETHER = 4096


def _larger(a: float, b: float) -> float:
    """NaN is larger than any number."""
    return a if a != a or a > b else b


def _compared(
    left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float, part: int
) -> tuple[int, float]:
    """The same of two tensors in memory. What is computed is of `part` elements at a time."""
    exact = left.dtype == right.dtype and not rtol and not atol
    left, right = left.contiguous().view(-1), right.contiguous().view(-1)
    if exact and _bits_equal(left, right):
        return 0, 0.0
    if _FLOAT4 in (left.dtype, right.dtype):
        if left.dtype != right.dtype:
            return 0, 0.0  # torch cannot compute with them
        return int((left.view(torch.uint8) != right.view(torch.uint8)).sum()), 0.0
    count, largest = 0, 0.0
    for x, y in zip(left.split(part), right.split(part), strict=True):
        number, apart = _differences(x, y, None if exact else (rtol, atol))
        count += number
        largest = _larger(apart, largest)
    return count, largest


# Of an element: two of complex128, their difference and its size, and what torch makes on the way.
_BYTES_TO_COMPARE = 128


def _differences(
    left: torch.Tensor, right: torch.Tensor, tolerances: tuple[float, float] | None
) -> tuple[int, float]:
    """The same of two flat tensors in memory; bit by bit without tolerances."""
    x, y = _wide(left, right), _wide(right, left)
    if tolerances is None:
        size = left.dtype.itemsize
        bits = [each.view(torch.uint8).view(-1, size) for each in (left, right)]
        count = int((bits[0] != bits[1]).any(dim=1).sum())
    else:
        count = int((~_close(x, y, right, *tolerances)).sum())
    apart = _apart(x, y)[~(torch.isnan(x) & torch.isnan(y)) & (x != y)].to(torch.float64)
    return count, float(apart.max()) if apart.numel() else 0.0


def _bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _close(
    x: torch.Tensor, y: torch.Tensor, right: torch.Tensor, rtol: float, atol: float
) -> torch.Tensor:
    """Which elements of `_wide` ones are equal within the tolerances; `right` is what y was."""
    if x.dtype != torch.int64:
        return torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    return (x == y) | (_apart(x, y) <= atol + rtol * right.to(torch.float64).abs())


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """|x - y|; of integers exact up to 2^53, however far apart they are."""
    if x.dtype != torch.int64:
        return (x - y).abs()
    return (torch.maximum(x, y) - torch.minimum(x, y)).view(torch.uint64).to(torch.float64)


def _wide(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`value` in the dtype in which it is compared with `other`: int64, float64 or complex128."""
    if value.dtype.is_complex or other.dtype.is_complex:
        return _as_float(value).to(torch.complex128)
    if value.dtype.is_floating_point or other.dtype.is_floating_point:
        return _as_float(value).to(torch.float64)
    if value.dtype == torch.uint64:
        if other.dtype != torch.uint64:
            return value.to(torch.float64)
        return _shifted(value)
    return value.to(torch.float64 if other.dtype == torch.uint64 else torch.int64)


def _shifted(value: torch.Tensor) -> torch.Tensor:
    """uint64 less 2^63, as int64, for which torch has more kernels."""
    return value.view(torch.int64) ^ torch.iinfo(torch.int64).min


def _as_float(value: torch.Tensor) -> torch.Tensor:
    if value.dtype.itemsize == 1 and value.dtype.is_floating_point:
        value = value.to(torch.float32)  # float8 lacks kernels
    return value
