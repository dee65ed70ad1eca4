"""The table "Where others win" of docs/benchmarks.md, from the pages that have been measured."""

from __future__ import annotations

import dataclasses
import re

from benchmarks import environment
from benchmarks.pages import PAGES, path_of

DOCUMENT = environment.REPOSITORY / "docs" / "benchmarks.md"
BEGIN, END = "<!-- others win, by the pages -->", "<!-- end of others win -->"
_SECTION = re.compile(r"## (\S+), memory (\S+)")
_TIMES = re.compile(r"([\d.]+)x")


@dataclasses.dataclass(frozen=True, order=True)
class _Job:
    """A row of a page, one of its figures (empty for the rate), and one of our contenders."""

    row: str
    figure: str
    ours: str


def of_page(text: str) -> dict[_Job, list[tuple[float, str]]]:
    """The best other of each job that ours loses, and in times of it, per state of memory."""
    found: dict[_Job, list[tuple[float, str]]] = {}
    row, head = "", list[str]()
    state: dict[_Job, tuple[float, str]] = {}

    def end_of_state() -> None:
        for job, best in state.items():
            if best[0] < 1:
                found.setdefault(job, []).append(best)
        state.clear()

    for line in text.splitlines():
        if section := _SECTION.match(line):
            end_of_state()
            row = section[1]
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        head = head or cells
        what, _, than = head[0].partition("times ")
        if not than.startswith(("faster than", "less than")):
            continue
        for ours, cell in zip(head[1:], cells[1:], strict=True):
            if times := _TIMES.match(cell):
                job = _Job(row, what.strip(": "), ours)
                state[job] = min(state.get(job, (1.0, "")), (float(times[1]), cells[0]))
    end_of_state()
    return found


def table() -> str:
    """The table, in the order of the pages."""
    lines = ["| row | figure | ours | best other | ours in times of it |", "|---|---|---|---|---|"]
    for page in PAGES:
        if not path_of(page).exists():
            continue
        for job, states in of_page(path_of(page).read_text()).items():
            low, high = (f"{times:.2f}" for times in (min(states)[0], max(states)[0]))
            times = low if low == high else f"{low} to {high}"
            others = ", ".join(dict.fromkeys(other for _, other in states))
            link = f"[`{job.row}`]({path_of(page).name})"
            lines.append(f"| {link} | {job.figure or 'rate'} | {job.ours} | {others} | {times} |")
    return "\n".join(lines)


def write() -> None:
    """Puts the table of the pages in its place in the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


def written() -> str:
    """The table that stands in the document."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip()
