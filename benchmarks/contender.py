"""What takes part in a benchmark: contenders, and the rows that put them side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.program import LimitsProgram, Timing

Role = Literal["rival", "ours", "limit"]


def nothing() -> None:
    """The default of the steps that a contender does not need."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do a row's job. Only ``run`` is timed; the other steps happen around it."""

    name: str
    role: Role
    run: Callable[[], Timing | None]
    """Does the job. What works in another process returns the timing that was taken there."""
    before: Callable[[], None] = nothing
    check: Callable[[], None] = nothing
    """Called after ``run`` in round 1; raises if the bytes are not the right ones."""
    after: Callable[[], None] = nothing
    """Removes what ``run`` made, also after a failure."""
    planner: str = "-"
    nesting: str = "-"
    skip: str = ""
    """Why this contender cannot run here; empty if it can."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of each run that a row reports in place of the usual ones; less is better."""

    key: str
    """Its key in :attr:`benchmarks.program.Timing.figures`."""
    title: str
    worst: bool = False
    """Show the worst round too."""
    compared: bool = False
    """Show the limit's part of it, if the limit has it, and how many times less ours are than
    the rivals'. It must be more than zero."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A job, its size and who does it."""

    title: str
    bytes: int
    tensors: int
    contenders: list[Contender]
    limit: str
    """The name of the contender that is the physical limit of this job; empty if none."""
    per_tensor: bool = False
    """Show microseconds per tensor, less the limit's own if there is one, instead of GB/s."""
    figures: Sequence[Figure] = ()
    """What the table shows in place of rates, if anything."""
    bound: str = "limit"
    """What ``limit`` is to the others: "limit", or "reference" where it can be beaten."""
    memory: int = 3
    """Touch this many times ``bytes`` before a run, if memory is to be touched."""
    close: Callable[[], None] = nothing


@dataclasses.dataclass(frozen=True)
class Context:
    """What a row is built from."""

    directory: Path
    """An existing directory on the disk to measure; a row leaves nothing in it."""
    scale: float
    """1.0 is the full size."""
    program: LimitsProgram


RowBuilder = Callable[[Context], Row]
ROWS: dict[str, RowBuilder] = {}
Memory = Literal["as-is", "touched"]
MEMORY_STATES: tuple[Memory, ...] = ("as-is", "touched")
MEMORY_OF: dict[str, tuple[Memory, ...]] = {}
"""The states that a row is measured in; both if it is not here."""


def row(
    name: str, memory: tuple[Memory, ...] = MEMORY_STATES
) -> Callable[[RowBuilder], RowBuilder]:
    """Registers the builder of the row ``name``; of some the state of memory changes nothing."""

    def register(builder: RowBuilder) -> RowBuilder:
        if name in ROWS:
            raise ValueError(f"two rows are named {name}")
        ROWS[name] = builder
        MEMORY_OF[name] = memory
        return builder

    return register
