"""What the demo shows: headings, progress bars, tables and the list of checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that the demo proves, or fails to."""

    name: str
    passed: bool
    detail: str


class Report:
    """Prints to the console and keeps the checks for the summary at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.checks: list[Check] = []
        self._part = 0

    def heading(self, title: str) -> None:
        self._part += 1
        self.console.print()
        self.console.rule(f"[bold]{self._part}. {escape(title)}", align="left")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def check(self, name: str, passed: bool, detail: str) -> None:
        """Records a check and prints it at once."""
        self.checks.append(Check(name, passed, detail))
        mark = "[green]ok[/]  " if passed else "[bold red]FAIL[/]"
        self.console.print(f"{mark} {escape(name)}: {escape(detail)}", highlight=False)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(show_edge=False, pad_edge=False)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*map(escape, row))
        self.console.print(table)

    @contextlib.contextmanager
    def progress(
        self, name: str, world: int, steps: int
    ) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Shows a bar for one training run; the value is called with each event of the run."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bars:
            title = f"{name}, {world} processes"
            bar = bars.add_task(title, total=steps, text="starting")

            def show(event: dict[str, Any]) -> None:
                if event["kind"] == "step":
                    bars.update(bar, completed=event["step"], text=f"loss {event['loss']:.3f}")
                elif event["kind"] == "resumed":
                    bars.update(bar, completed=event["step"], text=event["checkpoint"])
                elif event["kind"] == "saved":
                    bars.console.print(saved_line(event), highlight=False)
                elif event["kind"] == "round":
                    bars.update(bar, completed=event["round"], text=event["text"])

            yield show

    def failure(self, text: str) -> None:
        """Prints why the demo ended early."""
        self.console.print("\n[bold red]The demo stopped:")
        self.note(text)

    def summary(self) -> bool:
        """Prints the checks that failed, or that none did; returns whether all passed."""
        failed = [check for check in self.checks if not check.passed]
        self.console.print()
        if failed:
            self.console.print(f"[bold red]{len(failed)} of {len(self.checks)} checks failed:")
            for check in failed:
                self.console.print(f"  {escape(check.name)}: {escape(check.detail)}")
        else:
            self.console.print(f"[bold green]All {len(self.checks)} checks passed.")
        return not failed


def saved_line(event: dict[str, Any]) -> str:
    """Describes a finished save."""
    rate = event["bytes"] / event["seconds"] / 1e9
    return (
        f"  step {event['step']}: {megabytes(event['bytes'])} on disk after "
        f"{1e3 * event['seconds']:.0f} ms ({rate:.2f} GB/s), "
        f"training waited {1e3 * event['blocked']:.0f} ms"
    )


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
