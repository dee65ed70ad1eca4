"""What is read of tensors for targets, in place or in waves through a piece of host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.planner import ReadItem

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.native.dtypes import DTYPE_NAMES, TORCH_DTYPES, widens

# Host memory for tensors that cannot be read in place: a wave of at most this much; and two where
# devices copy from one while the other is read, so large that they seldom wait.
WAVE_BYTES = 32 << 20
DEVICE_WAVE_BYTES = 128 << 20
_ALIGNMENT = 64  # of a tensor in a wave, in bytes; more than any dtype needs
# What the core casts to each other while it reads, and refuses where a value would be lost.
_CAST_BY_CORE = frozenset(TORCH_DTYPES[name] for name in core.CASTABLE if name in TORCH_DTYPES)


@dataclass(slots=True)
class Request:
    """A box of a stored tensor, and the target that it goes to."""

    item: ReadItem
    target: torch.Tensor  # what the planner gave
    offsets: list[int]  # in elements of the header
    stored: torch.dtype
    packed: int = 1  # elements of the header per element of the target, in the last dimension
    shared: bool = False  # another rank of this node loads it too
    own_way: bool = False  # the target has no memory that is known: its own `copy_` fills it

    @property
    def held(self) -> torch.dtype:
        """The dtype in a wave: the target's if the core casts to it and it is no larger, else the
        stored one."""
        to = self.target.dtype
        return to if to.itemsize <= self.stored.itemsize and self.cast_by_core else self.stored

    @property
    def cast_by_core(self) -> bool:
        return self.stored in _CAST_BY_CORE and self.target.dtype in _CAST_BY_CORE

    @property
    def size(self) -> int:
        """Bytes of the box in a wave."""
        return self.target.numel() * self.held.itemsize


def padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def cut(request: Request, most: int) -> Iterator[Request]:
    """The request in boxes of at most `most` bytes, cut along the outermost dimension that there
    is."""
    if request.size <= most:
        yield request
        return
    target = request.target
    dim = next(d for d, size in enumerate(target.shape) if size > 1)
    # Whole slices where they fit, else one slice, which is cut further.
    count = max(1, most * target.shape[dim] // request.size)
    scale = request.packed if dim == target.dim() - 1 else 1
    for first in range(0, target.shape[dim], count):
        part = target.narrow(dim, first, min(count, target.shape[dim] - first))
        offsets = list(request.offsets)
        offsets[dim] += first * scale
        yield from cut(replace(request, target=part, offsets=offsets), most)


def waves(requests: list[Request], most: int) -> Iterator[list[Request]]:
    wave: list[Request] = []
    size = 0
    for request in requests:
        for part in cut(request, most):
            if wave and size + padded(part.size) > most:
                yield wave
                wave, size = [], 0
            wave.append(part)
            size += padded(part.size)
    if wave:
        yield wave


def carve(memory: torch.Tensor, wave: list[Request]) -> list[torch.Tensor]:
    """Contiguous tensors of the wave's shapes and dtypes, one after another in `memory`."""
    held = []
    start = 0
    for request in wave:
        flat = memory[start : start + request.size].view(request.held)
        held.append(flat.view(request.target.shape))
        start += padded(request.size)
    return held


def wait_for_copies(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _largest(dtype: torch.dtype) -> float:
    """The largest number that is rounded to a value of `dtype`."""
    info = torch.finfo(dtype)
    return float(info.max) + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2


def check_values(request: Request, value: torch.Tensor) -> None:
    """No value may change beyond rounding: a finite one stays finite, an integer the same."""
    source, target = value.dtype, request.target
    if widens(source, target.dtype):
        return
    fqn = request.item.storage_index.fqn
    result = target.to("cpu") if target.device.type != "cpu" else target
    if target.dtype.is_floating_point or target.dtype.is_complex:
        # float8 dtypes lack comparison kernels; float32 holds all of their values.
        wide = result.to(torch.float32) if target.dtype.itemsize == 1 else result
        was = value.to(torch.float32) if source.itemsize == 1 else value
        if source.is_floating_point or source.is_complex:
            lost = ~torch.isfinite(wide) & torch.isfinite(was)
        else:
            lost = ~torch.isfinite(wide)
        if target.dtype.itemsize == 1:
            # Some casts to float8 give the largest value where others give infinity.
            lost |= torch.isfinite(was) & (was.double().abs() > _largest(target.dtype))
            # Some have no infinity.
            lost |= torch.isinf(was) & ~torch.isinf(wide)
        if target.dtype == torch.float8_e8m0fnu:  # nor 0, nor a sign
            lost |= was.double() <= 0
        what = "out of range"
    else:
        lost = result.to(source) != value
        what = "another number"
    if bool(lost.any()):
        said, wanted = (DTYPE_NAMES.get(dtype, dtype) for dtype in (source, target.dtype))
        raise InvalidArgumentError(
            f"at least {int(lost.sum())} values of {said} would be {what} as {wanted}", tensor=fqn
        )
