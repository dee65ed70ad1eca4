"""The log of saves (`log_path=` of a save) as data: which rank did what, and when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt.errors import CorruptError

# In the order in which they come. "wait" comes between the others, wherever a rank waits.
PHASES = {
    "queue": "wait for its turn",
    "stage": "copy to host memory",
    "plan": "plan",
    "write": "write and fsync",
    "commit": "commit, by the coordinator",
    "wait": "wait for other ranks",
    "unknown": "not told",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of one rank: seconds from the start of the save on the first rank, and how many."""

    phase: str
    begin: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RankSave:
    """What one rank did in one save: a line of the log.

    started: in seconds since 1970. spans: in ascending order, without gaps, from `started` to
    `ended`.
    """

    path: str
    rank: int
    world_size: int
    started: float
    ended: float
    written_bytes: int | None
    error: str | None
    spans: tuple[Span, ...]

    def seconds(self, phase: str) -> float | None:
        """In all spans of the phase; None where there is none."""
        found = [span.seconds for span in self.spans if span.phase == phase]
        return sum(found) if found else None


@dataclass(slots=True)
class LoggedSave:
    """The lines of one save, by rank; not every rank needs to have one.

    started, ended: of the first rank that began, and of the last one that ended.
    """

    path: str
    world_size: int
    ranks: dict[int, RankSave] = field(default_factory=dict)
    started: float = math.inf
    ended: float = -math.inf

    def add(self, line: RankSave) -> None:
        self.ranks[line.rank] = line
        self.started = min(self.started, line.started)
        self.ended = max(self.ended, line.ended)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def missing(self) -> Iterator[int]:
        """The ranks without a line."""
        return (rank for rank in range(self.world_size) if rank not in self.ranks)

    def spans(self, rank: int) -> list[Span]:
        """Those of a rank, with times from the start of the save on the first rank."""
        mine = self.ranks[rank]
        ahead = mine.started - self.started
        return [Span(each.phase, each.begin + ahead, each.seconds) for each in mine.spans]


def read_logs(paths: Sequence[str]) -> list[LoggedSave]:
    """The saves of some logs, in the order of their beginnings. Lines belong together that have one
    path and one number of ranks, each another rank, and times that overlap.

    Raises CorruptError for a line that is none of a log, OSError.
    """
    lines = sorted((line for path in paths for line in _lines(path)), key=lambda line: line.started)
    saves: list[LoggedSave] = []
    latest: dict[tuple[str, int], list[LoggedSave]] = {}
    for line in lines:
        known = latest.setdefault((line.path, line.world_size), [])
        # Lines come by their beginnings: to a save that is over no line comes any more.
        known[:] = [
            save
            for save in known
            if line.started <= save.ended and len(save.ranks) < save.world_size
        ]
        for save in known:
            if line.rank not in save.ranks:
                break
        else:
            save = LoggedSave(line.path, line.world_size)
            known.append(save)
            saves.append(save)
        save.add(line)
    return saves


def _lines(path: str) -> Iterator[RankSave]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _parsed(json.loads(line))
            except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, and ours
                raise CorruptError(f"line {number} is not of a save: {error}", file=path) from None


_LONGEST = 1e11  # seconds: some thousand years


class _Fields:
    """The fields of a line, each of the type that it must have; those that it does not know of are
    of a newer version."""

    def __init__(self, line: Any) -> None:
        if not isinstance(line, dict):
            raise ValueError("it is no JSON object")
        self._line = line

    def _value(self, name: str, required: bool) -> Any:
        value = self._line.get(name)
        if value is None and required:
            raise ValueError(f"{name!r} is missing")
        return value

    def text(self, name: str, *, required: bool = False) -> str | None:
        value = self._value(name, required)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name!r} is no text")
        return value

    def count(self, name: str, *, required: bool = False) -> int | None:
        value = self._value(name, required)
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
            raise ValueError(f"{name!r} is no count")
        return value

    def number(self, name: str, *, required: bool = False) -> float | None:
        value = self._value(name, required)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 <= value < _LONGEST:
            raise ValueError(f"{name!r} is no time")
        return float(value)


def _parsed(line: Any) -> RankSave:
    fields = _Fields(line)
    path = fields.text("path", required=True)
    rank, world_size = (fields.count(name, required=True) for name in ("rank", "world_size"))
    started, total = (fields.number(name, required=True) for name in ("started", "total_s"))
    assert path is not None and rank is not None and world_size is not None
    assert started is not None and total is not None
    if rank >= world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    written, error = fields.count("written_bytes"), fields.text("error")
    spans = tuple(_without_gaps(list(_known(fields, started)), total))
    return RankSave(path, rank, world_size, started, started + total, written, error, spans)


def _known(fields: _Fields, started: float) -> Iterator[Span]:
    waited = fields.number("waited_s") or 0.0
    yield Span("queue", 0.0, waited)
    yield Span("stage", waited, fields.number("staged_s") or 0.0)
    planned_at, planned = fields.number("planned_at"), fields.number("planned_s")
    if planned_at is None or planned is None:
        return
    agreed = min(fields.number("agreed_s") or 0.0, planned)
    begin = planned_at - started
    yield Span("plan", begin, planned - agreed)
    yield Span("write", begin + planned, fields.number("written_s") or 0.0)
    committed_at = fields.number("committed_at")
    if committed_at is not None:
        yield Span("commit", committed_at - started, fields.number("committed_s") or 0.0)


def _without_gaps(known: list[Span], total: float) -> Iterator[Span]:
    """`known` within [0, total], with what the rank did between them and after them. The clock of
    another node, by which the commit is, may put it a little too early."""
    tells = any(span.phase == "plan" for span in known)
    at, last = 0.0, ""
    for span in known:
        end = min(span.begin + span.seconds, total)
        begin = max(span.begin, at)
        if end <= begin:
            continue
        if begin > at:
            # What is staged is saved in turn.
            staged = span.phase == "plan" and last == "stage"
            yield Span("queue" if staged else "wait", at, begin - at)
        yield Span(span.phase, begin, end - begin)
        at, last = end, span.phase
    if total > at:
        yield Span("wait" if tells else "unknown", at, total - at)
