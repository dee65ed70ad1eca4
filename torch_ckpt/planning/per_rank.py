"""Values that every rank has its own of: random states, data loader positions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch_ckpt.ranks import rank_and_size

# "<path>.__rank_3_of_8__": the fqn under which rank 3 of 8 writes its value of the leaf at <path>.
_PART = re.compile(r"__rank_(\d+)_of_(\d+)__")


class PerRank:
    """Marks a leaf of a state dict whose value differs from rank to rank on purpose.

    Each rank's own `value` is written, and loaded back into `value` of the PerRank that stands at
    the same place in the target, on the same rank of as many ranks. The value is a tensor, or any
    object that the objects file can say; it is not flattened. Needs torch_ckpt's planners.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def __getstate__(self) -> Any:
        return (self.value,)

    def __setstate__(self, state: Any) -> None:
        (self.value,) = state


def rank_part(rank: int, world_size: int) -> str:
    """The last component of the fqn of one rank's value."""
    return f"__rank_{rank}_of_{world_size}__"


def is_rank_part(part: str) -> bool:
    """Whether this is what `rank_part` gives for some rank of some world."""
    return _PART.fullmatch(part) is not None


def saved_world_sizes(saved: Iterable[str]) -> dict[str, list[int]]:
    """By fqn, the world sizes for which `saved`, the fqns of a checkpoint, has per-rank values."""
    sizes: dict[str, set[int]] = {}
    for name in saved:
        fqn, _, last = name.rpartition(".")
        part = _PART.fullmatch(last)
        if part is not None:
            sizes.setdefault(fqn, set()).add(int(part[2]))
    return {fqn: sorted(worlds) for fqn, worlds in sizes.items()}


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Whose PerRank values a planner means: those that it was told, or of the default group."""
    if rank is not None and world_size is not None:
        return rank, world_size
    return rank_and_size()
