"""Tensors that the engine is to copy from: where it can reach them, and when they are complete."""

from __future__ import annotations

from typing import Any

import torch

MAX_DIMENSIONS = 8  # kMaxDims in csrc/base/box.h


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, strided and not on the CPU, where the engine can read it: on a CUDA device, where
    kernels that conjugate or negate it may still run, or copied to host memory.
    """
    if tensor.is_cuda and torch.version.cuda is not None:  # and not ROCm, which is_cuda too
        # Not left to the dispatcher: the engine waits only for the kernels queued until now.
        return tensor.resolve_conj().resolve_neg()
    return tensor.cpu()


def in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int] | None]:
    """`tensor` with its dimensions in the order in which they stand in memory, and what permutes
    them back: so a device copies it as it is. None where they are in that order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    if order == sorted(order):
        return tensor, None
    return tensor.permute(order), [order.index(dim) for dim in range(tensor.dim())]


def queued_kernels(tensors: list[torch.Tensor]) -> list[Any]:
    """Events after all that this thread has queued, one for every CUDA device of `tensors`. The
    engine copies on streams of its own: `wait_for` them first, in any thread."""
    return [
        torch.cuda.current_stream(device).record_event()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}
    ]


def wait_for(events: list[Any]) -> None:
    for event in events:
        event.synchronize()
