"""Who talks to whom: each rank to the one above it and to at most six below it."""

from __future__ import annotations

# A save and another one beside it take two trees: 16 descriptors of a rank, with a connection each
# to the store, however many ranks there are. Of 1,024 none is further than four from rank 0.
FAN_OUT = 6


def above(rank: int) -> int | None:
    return None if rank == 0 else (rank - 1) // FAN_OUT


def below(rank: int, size: int) -> range:
    first = FAN_OUT * rank + 1
    return range(min(first, size), min(first + FAN_OUT, size))


def way(rank: int, to: int) -> int:
    """Which of the ranks below `rank` leads to rank `to`, or is that."""
    while (to - 1) // FAN_OUT != rank:
        to = (to - 1) // FAN_OUT
    return to
