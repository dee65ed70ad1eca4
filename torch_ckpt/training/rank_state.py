"""What a rank has of its own: random states, and where its data loader is."""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torch_ckpt.errors import IncompleteError, InvalidArgumentError, warn

Reshard = Callable[[list[Any], int, int], Any]


def random_state() -> dict[str, Any]:
    """The states of python, numpy, torch and all devices that have one. Draws no number."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": bytes(torch.get_rng_state().numpy()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    for kind, module in _devices():
        if getattr(module, "is_initialized", lambda: True)():  # or none was drawn yet
            states = [module.get_rng_state(index) for index in range(module.device_count())]
            state[kind] = [bytes(each.cpu().numpy()) for each in states]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a `random_state`. Devices that there are not any more are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for kind, module in _devices():
        for index, each in enumerate(state.get(kind, ())[: module.device_count()]):
            module.set_rng_state(_tensor(each), index)


def new_random_state(state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Begin streams of random numbers that follow from `state`, another rank's, and from which rank
    this is of how many."""
    digest = hashlib.sha256(repr((state["python"], rank, world_size)).encode())
    digest.update(state["torch"])
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices too


def _devices() -> list[tuple[str, Any]]:
    """The kind of devices that are here, and torch's module of it."""
    kind = torch.accelerator.current_accelerator()
    return [] if kind is None else [(kind.type, torch.get_device_module(kind))]


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def restore_random_state(states: Mapping[str, Any], rank: int, world_size: int) -> None:
    """`states`: of the ranks that saved, by their numbers, those that were read: this rank's, or
    where another number of ranks saved, rank 0's."""
    saved = states["world_size"]
    if saved == world_size:
        set_random_state(states[str(rank)])
        return
    if rank == 0:
        warn(
            f"the random states are of {saved} ranks, and here are {world_size}: all ranks begin "
            "new streams of random numbers, which follow from rank 0's"
        )
    new_random_state(states["0"], rank, world_size)


_PART = re.compile(r"([0-9]+)_of_([0-9]+)")


def part_name(rank: int, size: int) -> str:
    """What the state of the data loader of data rank `rank` of `size` is called."""
    return f"{rank}_of_{size}"


def saved_size(names: Collection[str], path: str) -> int:
    """How many data ranks have saved the states of these names. Raises IncompleteError where they
    are not all there."""
    matches = [_PART.fullmatch(name) for name in names]
    sizes = {int(match[2]) if match else 0 for match in matches}
    (size,) = sizes if len(sizes) == 1 else (0,)
    if not size or {part_name(rank, size) for rank in range(size)} != set(names):
        raise IncompleteError(
            f"has the states {', '.join(sorted(names))} of data loaders, which are not those of "
            "all ranks",
            file=path,
        )
    return size


def needs_reshard(saved: int, size: int, path: str) -> InvalidArgumentError:
    """The error where `saved` data ranks have saved what `size` are to load."""
    return InvalidArgumentError(
        f"the data loader was saved by {saved} ranks and is to be loaded by {size}, and its state "
        "cannot be shared out by itself: leave it alone with exclude=['dataloader'], or say how "
        "with reshard=f, where f(states, rank, size) gives this rank's",
        file=path,
    )
