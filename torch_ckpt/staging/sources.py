"""Tensors that the engine is to copy from: where it can reach them, and when they are complete."""

from __future__ import annotations

from typing import Any

import torch

MAX_DIMENSIONS = 8  # kMaxDims in csrc/base/box.h


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, strided and not on the CPU, where the engine can read it: contiguous on a CUDA
    device, where kernels that make it so may still run, or copied to host memory.
    """
    if tensor.is_cuda and torch.version.cuda is not None:  # and not ROCm, which is_cuda too
        # Not left to the dispatcher: the engine waits only for the kernels queued until now.
        return tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.cpu()


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
