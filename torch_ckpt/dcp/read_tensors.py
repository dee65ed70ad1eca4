"""Tensors of a load plan, in one native call; then those that need a cast or another device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt import _ext
from torch_ckpt.dtypes import PACKED, TORCH_DTYPES, widens
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.jobs import Job

# Host memory for tensors that cannot be read in place: at most this much at a time, or one tensor.
_WAVE_BYTES = 256 << 20


@dataclass(slots=True)
class _Request:
    item: ReadItem
    target: torch.Tensor  # what the planner gave
    offsets: list[int]  # in elements of the header
    stored: torch.dtype


class TensorReader:
    """Reads the tensor items of one plan."""

    def __init__(
        self,
        path: str,
        described: dict[str, Any],
        *,
        workers: int,
        verify: bool,
        strict_dtype: bool,
    ) -> None:
        """`described` is the core's answer to "describe"; it names the save to read from."""
        self.path = path
        self.described = described
        self.workers = workers
        self.verify = verify
        self.strict_dtype = strict_dtype

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        dtypes = dict(zip(self.described["names"], self.described["dtypes"], strict=True))
        direct: list[_Request] = []
        indirect: list[_Request] = []
        for item in items:
            fqn = item.storage_index.fqn
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise InvalidArgumentError(
                    f"the target has {tuple(target.shape)}, the plan reads {tuple(item.lengths)}",
                    tensor=fqn,
                )
            name = dtypes[fqn]
            offsets = list(item.storage_offsets)
            if name in PACKED and offsets:
                offsets[-1] *= PACKED[name]
            request = _Request(item, target, offsets, TORCH_DTYPES[name])
            (direct if _in_place(request) else indirect).append(request)
        # Refuse before a byte is copied.
        for request in indirect:
            self._check_cast(request)
        self._fetch(direct, [request.target for request in direct])
        torch.autograd.graph.increment_version([request.target for request in direct])
        for request in direct:
            planner.commit_tensor(request.item, request.target)
        wave: list[_Request] = []
        size = 0
        for request in indirect:
            wave.append(request)
            size += request.target.numel() * request.stored.itemsize
            if size >= _WAVE_BYTES:
                self._convert(wave, planner)
                wave, size = [], 0
        self._convert(wave, planner)

    def _fetch(self, requests: list[_Request], into: list[torch.Tensor]) -> None:
        if not requests:
            return
        plan = {
            "path": self.path,
            "save_id": self.described["save_id"],
            "workers": self.workers,
            "verify": self.verify,
            "names": [request.item.storage_index.fqn for request in requests],
            "offsets": [request.offsets for request in requests],
        }
        with Job("read") as job:
            _ext.read(into, plan, job)

    def _convert(self, requests: list[_Request], planner: LoadPlanner) -> None:
        held = [torch.empty(r.target.shape, dtype=r.stored) for r in requests]
        self._fetch(requests, held)
        for request, value in zip(requests, held, strict=True):
            with torch.no_grad():
                request.target.copy_(value)
            _check_values(request, value)
            planner.commit_tensor(request.item, request.target)

    def _check_cast(self, request: _Request) -> None:
        fqn, source, target = request.item.storage_index.fqn, request.stored, request.target.dtype
        if source == target:
            return
        if self.strict_dtype:
            raise InvalidArgumentError(
                f"is stored as {source}, the target is {target} and strict_dtype is set", tensor=fqn
            )
        if source.is_complex and not target.is_complex:
            raise UnsupportedError(
                f"is stored as {source}; a cast to {target} would drop the imaginary part",
                tensor=fqn,
            )
        if not widens(source, target):
            warnings.warn(
                f"{fqn}: stored as {source}, loaded into {target}; values may lose precision",
                stacklevel=2,
            )


def _in_place(request: _Request) -> bool:
    target = request.target
    return (
        target.dtype == request.stored
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and not target.is_conj()
        and not target.is_neg()
        and target.dim() <= 8
        and (
            target.is_contiguous()
            or all(
                stride > 0 or size <= 1
                for stride, size in zip(target.stride(), target.shape, strict=True)
            )
        )
    )


def _check_values(request: _Request, value: torch.Tensor) -> None:
    """No value may change beyond rounding: a finite one stays finite, an integer the same."""
    source, target = request.stored, request.target
    if source == target.dtype or widens(source, target.dtype):
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
        what = "not finite"
    else:
        lost = result.to(source) != value
        what = "another number"
    if bool(lost.any()):
        raise InvalidArgumentError(
            f"{int(lost.sum())} values stored as {source} would be {what} as {target.dtype}",
            tensor=fqn,
        )
