"""From records to the numbers of the report: medians, worst rounds, ratios within a round."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.contender import Figure

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure over the rounds: the median, the worst round and the first one."""

    median: float
    worst: float
    first: float

    @classmethod
    def of(cls, values: Sequence[float], lower_is_better: bool = False) -> Spread:
        """The spread of one value per round, in order."""
        worst = max(values) if lower_is_better else min(values)
        return cls(statistics.median(values), worst, values[0])


@dataclasses.dataclass(frozen=True)
class FigureSummary:
    """One figure of one contender."""

    spread: Spread
    of_limit: Spread | None
    """The limit's figure divided by this one; None where it is not compared."""


@dataclasses.dataclass(frozen=True)
class ContenderSummary:
    """One line of a row's table."""

    name: str
    role: str
    planner: str
    nesting: str
    speed: Spread | None
    """GB/s, or microseconds per tensor, over the limit's time if the row has a limit; None if
    that limit could not be measured."""
    of_limit: Spread | None
    cpu: float
    """CPU seconds per GB, or CPU microseconds per tensor; the median."""
    machine_cpu: float
    """The same of the whole machine."""
    extra_memory: int
    """Bytes; the most of all rounds, because memory that is kept is only new once."""
    figures: dict[str, FigureSummary]
    """By the keys of the row's figures, as far as this contender has them."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster one of ours is than a rival, rounds compared pairwise."""

    ours: str
    rival: str
    times: Spread
    figure: str = ""
    """The figure that is so many times less; empty for the rate."""


@dataclasses.dataclass(frozen=True)
class RowSummary:
    """One row in one memory state."""

    name: str
    title: str
    memory: str
    bytes: int
    tensors: int
    limit: str
    bound: str
    """What the limit is called: "limit" or "reference"."""
    per_tensor: bool
    figures: list[Figure]
    contenders: list[ContenderSummary]
    ratios: list[Ratio]
    missing: list[str]
    """What was skipped or failed, with reasons."""
    failures: int


def summarise(records: Iterable[Record]) -> list[RowSummary]:
    """Groups the records of a run by row and memory state, in order of appearance."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["row"], record["memory"]), []).append(record)
    return [_summarise_row(group) for group in groups.values()]


def _summarise_row(records: list[Record]) -> RowSummary:
    row = next((record for record in records if record["kind"] == "row"), None)
    if row is None:  # its process ended before the row was built
        row = {"title": records[0]["row"], "bytes": 0, "tensors": 0, "limit": "", "per_tensor": 0}
        row["figures"] = []
    rounds: dict[str, dict[int, Record]] = {}
    missing, failures = [], 0
    for record in records:
        if record["kind"] == "measured":
            rounds.setdefault(record["contender"], {})[record["round"]] = record
        elif record["kind"] in ("skipped", "failed"):
            missing.append(f"{record['contender']} {record['kind']}: {record['reason']}")
            failures += record["kind"] == "failed"
    limit = rounds.get(row["limit"], {})
    contenders = [
        _summarise_contender(list(measured.values()), limit, row) for measured in rounds.values()
    ]
    figures = [Figure(**figure) for figure in row["figures"]]
    compared = [figure.key for figure in figures if figure.compared] if figures else [""]
    order = {"rival": 0, "ours": 1, "limit": 2}
    contenders.sort(key=lambda contender: order[contender.role])
    return RowSummary(
        name=records[0]["row"],
        title=row["title"],
        memory=records[0]["memory"],
        bytes=row["bytes"],
        tensors=row["tensors"],
        limit=row["limit"],
        bound=row.get("bound", "limit"),
        per_tensor=bool(row["per_tensor"]),
        figures=figures,
        contenders=contenders,
        ratios=[ratio for key in compared for ratio in _ratios(contenders, rounds, key)],
        missing=missing,
        failures=failures,
    )


def _summarise_contender(
    measured: list[Record], limit: dict[int, Record], row: Record
) -> ContenderSummary:
    first = measured[0]
    paired = [(record, limit[record["round"]]) for record in measured if record["round"] in limit]
    speed: Spread | None
    if not row["per_tensor"] or first["role"] == "limit":
        speed = Spread.of([rate(record) for record in measured])
    elif not row["limit"]:
        speed = Spread.of([record["seconds"] / row["tensors"] * 1e6 for record in measured], True)
    elif paired:
        net = [record["seconds"] - bound["seconds"] for record, bound in paired]
        speed = Spread.of([seconds / row["tensors"] * 1e6 for seconds in net], True)
    else:
        speed = None
    of_limit = None
    if paired and first["contender"] != row["limit"]:
        of_limit = Spread.of([rate(record) / rate(bound) for record, bound in paired])

    def cpu(field: str) -> float:
        seconds = statistics.median(record[field] for record in measured)
        if row["per_tensor"]:
            return float(seconds / row["tensors"] * 1e6)
        return float(seconds / first["bytes"] * 1e9)

    return ContenderSummary(
        name=first["contender"],
        role=first["role"],
        planner=first["planner"],
        nesting=first["nesting"],
        speed=speed,
        of_limit=of_limit,
        cpu=cpu("cpu_seconds"),
        machine_cpu=cpu("machine_cpu_seconds"),
        extra_memory=max(record["extra_memory"] for record in measured),
        figures={
            figure["key"]: _summarise_figure(figure, measured, paired)
            for figure in row["figures"]
            if figure["key"] in first["figures"]
        },
    )


def _summarise_figure(
    figure: Record, measured: list[Record], paired: list[tuple[Record, Record]]
) -> FigureSummary:
    key = figure["key"]
    parts = [
        bound["figures"][key] / record["figures"][key]
        for record, bound in paired
        if figure["compared"] and key in bound["figures"] and record is not bound
    ]
    values = [record["figures"][key] for record in measured]
    return FigureSummary(Spread.of(values, True), Spread.of(parts) if parts else None)


def rate(record: Record) -> float:
    """GB/s of one measurement."""
    return float(record["bytes"]) / float(record["seconds"]) / 1e9


def _ratios(
    contenders: list[ContenderSummary], rounds: dict[str, dict[int, Record]], figure: str
) -> list[Ratio]:
    def speed(record: Record) -> float:
        return 1 / float(record["figures"][figure]) if figure else rate(record)

    ratios = []
    for ours in (contender.name for contender in contenders if contender.role == "ours"):
        for rival in (contender.name for contender in contenders if contender.role == "rival"):
            both = sorted(rounds[ours].keys() & rounds[rival].keys())
            if both:
                times = [speed(rounds[ours][i]) / speed(rounds[rival][i]) for i in both]
                ratios.append(Ratio(ours, rival, Spread.of(times), figure))
    return ratios
