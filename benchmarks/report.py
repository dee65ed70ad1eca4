"""The report of a run: tables on the terminal, and the same tables as Markdown for the docs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.summary import ContenderSummary, RowSummary, Spread


@dataclasses.dataclass(frozen=True)
class Cells:
    """A table as text."""

    head: list[str]
    lines: list[list[str]]


def contender_cells(row: RowSummary) -> Cells:
    """One line per contender."""
    head = ["contender", "planner", "nesting"]
    per_tensor = f"us/tensor over {row.bound}" if row.limit else "us/tensor"
    head += [per_tensor if row.per_tensor else "GB/s", "worst", "first"]
    head += [f"of {row.bound}", "worst"]
    head += ["CPU us/tensor", "machine"] if row.per_tensor else ["CPU s/GB", "machine"]
    return Cells([*head, "extra GB"], [_contender_line(row, found) for found in row.contenders])


def _contender_line(row: RowSummary, contender: ContenderSummary) -> list[str]:
    is_limit = contender.role == "limit"
    speed, of_limit = contender.speed, contender.of_limit
    line = [_named(row, contender), contender.planner, contender.nesting]
    if speed is None:
        line += ["-", "-", "-"]
    else:
        unit = " GB/s" if is_limit and row.per_tensor else ""
        line += [number(value) + unit for value in (speed.median, speed.worst, speed.first)]
    if of_limit is None or is_limit:
        line += ["-", "-"]
    else:
        line += [_percent(of_limit.median), _percent(of_limit.worst)]
    line.append(number(contender.cpu))
    if is_limit:  # runs in a process of its own, between two looks at this one
        return [*line, "-", "-"]
    return [*line, number(contender.machine_cpu), number(contender.extra_memory / 1e9)]


def _named(row: RowSummary, contender: ContenderSummary) -> str:
    return f"{row.bound}: {contender.name}" if contender.role == "limit" else contender.name


def figure_cells(row: RowSummary) -> Cells:
    """One line per contender, for rows that report figures of their own."""
    bounded = {
        key
        for contender in row.contenders
        for key, found in contender.figures.items()
        if found.of_limit is not None
    }
    head = ["contender"]
    for figure in row.figures:
        head.append(figure.title)
        head += [f"of {row.bound}"] if figure.key in bounded else []
    lines = []
    for contender in row.contenders:
        line = [_named(row, contender)]
        for figure in row.figures:
            found = contender.figures.get(figure.key)
            line.append(_figure(found.spread, figure.worst) if found else "-")
            if figure.key in bounded:
                share = found.of_limit if found else None
                line.append(f"{_percent(share.median)} ({_percent(share.worst)})" if share else "-")
        lines.append(line)
    return Cells(head, lines)


def _figure(spread: Spread, worst: bool) -> str:
    return _spread(spread, "") if worst else number(spread.median)


def ratio_cells(row: RowSummary, figure: str = "") -> Cells:
    """How many times faster ours are: a line per rival, a column per contender of ours."""
    ratios = [ratio for ratio in row.ratios if ratio.figure == figure]
    ours = list(dict.fromkeys(ratio.ours for ratio in ratios))
    lines: dict[str, dict[str, Spread]] = {}
    for ratio in ratios:
        lines.setdefault(ratio.rival, {})[ratio.ours] = ratio.times
    said = f"{figure.replace('_', ' ')}: times less than" if figure else "times faster than"
    return Cells(
        [f"{said}, median (worst)", *ours],
        [
            [rival, *(_spread(found.get(name), "x") for name in ours)]
            for rival, found in lines.items()
        ],
    )


def number(value: float) -> str:
    """About three significant digits, no exponent."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:.{digits}f}"


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def _spread(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "-"
    return f"{number(spread.median)}{unit} ({number(spread.worst)}{unit})"


def tables(row: RowSummary) -> list[Cells]:
    """The tables of a row that have lines: of the contenders first, then of the ratios."""
    if row.figures:
        compared = [figure.key for figure in row.figures if figure.compared]
        found = [figure_cells(row), *(ratio_cells(row, key) for key in compared)]
    else:
        found = [contender_cells(row), ratio_cells(row)]
    return [cells for cells in found if cells.lines]


def heading(row: RowSummary) -> str:
    """Title and size of a row."""
    size = f"{row.tensors:,} tensors, {row.bytes / 1e9:.3g} GB"
    return f"{row.title}; {size}; memory {row.memory}" if row.bytes else row.title


def print_report(console: Console, environment: Mapping[str, str], rows: list[RowSummary]) -> None:
    """Prints everything that was measured, skipped or failed."""
    for key, value in environment.items():
        console.print(f"{key}: {value}", highlight=False, markup=False)
    for row in rows:
        console.print()
        for cells in tables(row):
            title = f"{row.name}: {heading(row)}" if cells.head[0] == "contender" else None
            console.print(_rich_table(cells, title))
        for line in row.missing:
            console.print(line, style="yellow", highlight=False, markup=False)


def _rich_table(cells: Cells, title: str | None) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(cells.head):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in cells.lines:
        table.add_row(*line)
    return table


def markdown(
    title: str, environment: Mapping[str, str], rounds: int, command: str, rows: list[RowSummary]
) -> str:
    """The text of a page of docs/, which ends with a digest of itself: see `is_as_written`."""
    facts = {**environment, "rounds": str(rounds)}
    parts = [
        f"# Benchmark results: {title}",
        "Generated by the command below; do not edit. Every number was measured in this one run; "
        "[benchmarks.md](benchmarks.md) tells how.",
        f"    {command}",
        _markdown_table(Cells(["what", "value"], [[key, value] for key, value in facts.items()])),
    ]
    for row in rows:
        parts.append(f"## {row.name}, memory {row.memory}")
        parts.append(f"{heading(row)}. {_of_one_run(environment)}".rstrip())
        parts += [_markdown_table(cells) for cells in tables(row)]
        parts += [f"- {line}" for line in row.missing]
    text = "\n\n".join(parts) + "\n\n"
    return f"{text}{SEAL}{_digest(text)} -->\n"


SEAL = "<!-- as written by the benchmarks: "


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_as_written(page: str) -> bool:
    """Whether nobody has changed a page since `markdown` made it."""
    text, _, seal = page.rpartition(SEAL)
    return seal == f"{_digest(text)} -->\n"


def _of_one_run(environment: Mapping[str, str]) -> str:
    """Where a table comes from, since tables are copied."""
    return ", ".join(
        environment[key] for key in ("torch_ckpt", "CPU", "date") if key in environment
    )


def _markdown_table(cells: Cells) -> str:
    lines = [cells.head, ["---"] * len(cells.head), *cells.lines]
    escaped = ([word.replace("|", "\\|") for word in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
