"""How a staged state crosses to another process: its region of memory as one descriptor, without a
copy, and the rest of it pickled, with places in the region for tensors.

Only multiprocessing's pickler does so, which sends to a process that this one has started; with
others a state is pickled as a dict. It is the memory itself that the receiver gets: whoever sends a
state keeps it, and does not end it, until the receiver is done with it, as with tensors on a device
that are sent with torch.multiprocessing. Then the memory serves other states.
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing import reduction
from typing import Any

import torch

from torch_ckpt.native import operators
from torch_ckpt.native.torch_private import storage_number
from torch_ckpt.staging.staged_state import StagedState

_expected = False


def expect() -> None:
    """From now on, stage states into memory that other processes can map.

    A state that was staged before is copied when it is sent. Its memory has huge pages, which
    memory files have only where the system's administrator wants it (shmem_enabled); so states that
    stay here are not staged so.
    """
    global _expected
    _expected = True


def is_expected() -> bool:
    return _expected


# Of a tensor in a region: dtype, sizes, strides and storage offset, in elements; and attributes,
# which are plain data by now.
_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int | torch.SymInt, dict[str, Any]]


class _Pickler(reduction.ForkingPickler):
    """Has numbers for the tensors that lie in `region`."""

    def __init__(self, buffer: io.BytesIO, region: operators.Region) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._storage = storage_number(region.memory)
        self._numbers: dict[int, int] = {}  # by id
        self.tensors: list[torch.Tensor] = []  # by number; kept, or ids would be given again

    def persistent_id(self, value: Any) -> int | None:
        if (
            type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or storage_number(value) != self._storage
            or value.is_conj()
            or value.is_neg()
            or value.requires_grad
        ):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def pack(state: StagedState) -> None:
    """Pickle what of `state` does not stay in its region, now: so that what cannot be pickled is an
    error of the stager, and not one in the middle of a save. Does nothing for a state that is
    copied when it is sent."""
    region = state._region
    if region is None or region.fd is None:
        return
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, region)
    pickler.dump(dict(state))
    places: list[_Place] = [
        (each.dtype, tuple(each.shape), each.stride(), each.storage_offset(), vars(each))
        for each in pickler.tensors
    ]
    state.packed = (places, buffer.getvalue())


def _reduce(state: StagedState) -> Any:
    region = state._region
    if region is None or region.fd is None:
        expect()
        return state.__reduce__()
    if state.packed is None:
        pack(state)
    packed, state.packed = state.packed, None
    descriptor = reduction.DupFd(region.fd)
    size = region.memory.nbytes
    return _receive, (descriptor, region.offset, size, region.used, *packed)


def _receive(
    descriptor: Any, offset: int, size: int, used: int, places: list[_Place], pickled: bytes
) -> StagedState:
    fd = descriptor.detach()
    try:
        region = operators.adopt(fd, offset, size, used)
    finally:
        os.close(fd)
    storage = region.memory.untyped_storage()
    tensors = []
    for dtype, shape, strides, begin, attributes in places:
        # Beyond the region's end this raises.
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, begin, shape, strides)
        if attributes:
            tensor.__dict__.update(attributes)
        tensors.append(tensor)
    state = StagedState(_Unpickler(pickled, tensors).load())
    state.lies_in(region, tensors)
    return state


reduction.register(StagedState, _reduce)
