"""The command ``python -m benchmarks [ROW...]``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks import environment, others_win, report
from benchmarks.before import BeforeError, build
from benchmarks.contender import MEMORY_OF, MEMORY_STATES, ROWS
from benchmarks.pages import PAGES, behind, path_of
from benchmarks.program import LimitsError, LimitsProgram
from benchmarks.row_processes import run_processes
from benchmarks.run_row import Record
from benchmarks.summary import summarise

SPACE_AT_FULL_SIZE = 16 << 30  # four inputs of a load row, one output, the limits' files
WIDTH = 190
ROUNDS = 5
PATIENCE_SECONDS = 600  # the load average needs minutes to forget what has ended
Number = TypeVar("Number", int, float)


def main(arguments: list[str] | None = None) -> int:
    """Runs the rows and reports; 1 if a contender failed, 2 if nothing could be run."""
    options = _parser().parse_args(arguments)
    import benchmarks.rows  # noqa: F401  registers the rows; imports torch

    if options.list:
        sys.stdout.write("".join(f"{name}\n" for name in ROWS))
        return 0
    if options.stale:
        found = {name: path_of(name) for name in PAGES if path_of(name).exists()}
        why = {name: behind(page.read_text()) for name, page in found.items()}
        sys.stdout.write("".join(f"{name} {text}\n" for name, text in why.items() if text))
        return 1 if any(why.values()) else 0
    if options.page:
        in_part = options.rows or options.scale != 1 or options.memory != "both"
        if in_part or options.busy or options.before or options.rounds < ROUNDS:
            return _refuse(
                "a page is all of its rows, at full size, in both states of memory, on an idle "
                f"machine, {ROUNDS} rounds or more: leave rows and other options away"
            )
        if not environment.commit().isalnum():  # a plus sign, or none
            return _refuse(
                "a page is of a commit: commit what tracked files differ in, or stash it"
            )
        options.rows = PAGES[options.page].rows
    unknown = [word for word in options.rows if not any(n.startswith(word) for n in ROWS)]
    if unknown:
        return _refuse(f"no row begins with {', '.join(unknown)}; there are {', '.join(ROWS)}")
    parent = Path(options.directory or tempfile.gettempdir()).resolve()
    needed = int(SPACE_AT_FULL_SIZE * options.scale)
    if shutil.disk_usage(parent).free < needed:
        return _refuse(
            f"{parent} has less than {needed / 1e9:.1f} GB free; name another --directory"
        )
    if not options.busy and not environment.wait_until_idle(PATIENCE_SECONDS):
        return _refuse(
            f"the load average stays above {environment.IDLE}: end what else is running, "
            "or say --busy for figures that mean little"
        )
    terminal = Console()
    # A file or a pipe has no width of its own, and tables in 80 columns cannot be read.
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    facts = environment.describe(parent)
    if facts["file system"].startswith(("tmpfs", "ramfs")):
        sys.stderr.write("the directory is in memory, not on a disk: name another --directory\n")
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=parent) as made:
        try:
            records = _run(options, Path(made), facts)
        except (LimitsError, BeforeError) as error:
            return _refuse(str(error))
    rows = summarise(records)
    report.print_report(console, facts, rows)
    if options.page:
        page = path_of(options.page)
        command = f"./dev bench --page {options.page} --rounds {options.rounds}"
        title = PAGES[options.page].title
        page.write_text(report.markdown(title, facts, options.rounds, command, rows))
        others_win.write()
        console.print(f"wrote docs/{page.name}", highlight=False)
    return 1 if any(row.failures for row in rows) else 0


def _run(options: argparse.Namespace, directory: Path, facts: Mapping[str, str]) -> list[Record]:
    """Runs each row in a process of its own, first with memory as it is, then touched."""
    program = LimitsProgram.build(directory)
    before = build(options.before) if options.before else None
    if options.jsonl:
        Path(options.jsonl).write_text(json.dumps({"kind": "environment", **facts}) + "\n")
    memory_states = MEMORY_STATES if options.memory == "both" else (options.memory,)
    records: list[Record] = []
    for name in ROWS:
        if options.rows and not any(name.startswith(word) for word in options.rows):
            continue
        # A row that one state is enough for is measured in that one, whatever was asked for.
        of_row = [state for state in memory_states if state in MEMORY_OF[name]]
        for memory in of_row or MEMORY_OF[name]:
            words = [name, "--memory", memory, "--rounds", str(options.rounds)]
            words += ["--scale", str(options.scale), "--program", str(program.path)]
            found = run_processes(words, directory, before)
            records += found
            if options.jsonl:  # at once: all rows take hours
                with Path(options.jsonl).open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in found)
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures torch_ckpt, its rivals and the machine."
    )
    parser.add_argument(
        "rows", nargs="*", help="beginnings of row names; all rows if none is given"
    )
    parser.add_argument("--list", action="store_true", help="print the row names")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="name the pages of docs/ that are of another engine than this one, or of no commit",
    )
    parser.add_argument("--rounds", type=_positive(int), default=ROUNDS, help="default %(default)s")
    parser.add_argument(
        "--scale", type=_positive(float), default=1.0, help="part of the full size, 1 if not given"
    )
    parser.add_argument(
        "--memory",
        choices=[*MEMORY_STATES, "both"],
        default="both",
        help="whether free memory is touched before each run (default %(default)s)",
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help=f"run although the load average is above {environment.IDLE}; otherwise the run waits "
        f"up to {PATIENCE_SECONDS // 60} minutes for it and then refuses",
    )
    parser.add_argument(
        "--before",
        metavar="COMMIT",
        help="measure ours of an earlier commit in place of the rivals, round by round; it is "
        "built first",
    )
    parser.add_argument("--directory", help="where to write; a temporary directory if not given")
    parser.add_argument("--jsonl", help="also write every measurement to this file")
    parser.add_argument(
        "--page",
        choices=PAGES,
        help="measure the rows of a page of docs/, all at full size, and write the page anew",
    )
    return parser


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = kind(text)
        if not value > 0:
            raise ValueError(text)
        return value

    return parse


def _refuse(reason: str) -> int:
    sys.stderr.write(f"python -m benchmarks: {reason}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
