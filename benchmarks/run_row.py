"""Runs one row in one memory state: ``python -m benchmarks.run_row`` is its process.

A row has a process of its own so that no other row's memory, caches or crash reach it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment, rivals
from benchmarks.contender import MEMORY_STATES, ROWS, Contender, Context, Memory, Row
from benchmarks.measure import Measurement, measure, memory_in_use
from benchmarks.program import LimitsProgram, MemoryWatcher

Record = dict[str, Any]
Emit = Callable[[Record], None]
DONE = "the round is done\n"
"""What a process that takes turns writes behind each of its rounds."""


def run_row(
    name: str,
    context: Context,
    memory: Memory,
    rounds: Iterable[int],
    emit: Emit,
    before: str = "",
    rivals: bool = True,
) -> None:
    """Builds the row, runs its contenders in turn once a round, removes its files.

    ``rounds`` numbers them, from 1 on. Each round starts with another contender, so that none
    always follows the same one. A contender that raises is reported by a record and left out of
    the later rounds. ``emit`` gets one record for the row, one per measurement, one per contender
    skipped or failed. ``before`` names the commit of ours where that is an earlier one: then
    only ours run, as rivals. Without ``rivals`` those of others are left out.
    """
    with MemoryWatcher(context.program) as watcher:
        row = ROWS[name](context)
        if before:
            row = _of_before(row, before)
        elif not rivals:
            own = [contender for contender in row.contenders if contender.role != "rival"]
            row = dataclasses.replace(row, contenders=own)
        try:
            emit(_row_record(name, memory, row))
            active = []
            for contender in row.contenders:
                if contender.skip:
                    emit(_record("skipped", name, memory, contender, reason=contender.skip))
                else:
                    active.append(contender)
            kept = 0  # bytes that runs of ours have left in use
            for number in rounds:
                for contender in _rotated(active, number - 1):
                    at_start = memory_in_use(watcher)
                    own = kept if contender.role == "ours" else 0
                    try:
                        result = _run_once(contender, context, row, memory, watcher, own)
                        if number == 1:
                            contender.check()
                    except Exception as error:  # a record of it makes the whole run fail
                        reason = _say(error, context)
                        emit(_record("failed", name, memory, contender, reason=reason))
                        active = [other for other in active if other is not contender]
                    else:
                        values = dataclasses.asdict(result)
                        emit(_record("measured", name, memory, contender, round=number, **values))
                    finally:
                        contender.after()
                        if contender.role == "ours":
                            kept += memory_in_use(watcher) - at_start
        finally:
            row.close()


def _of_before(row: Row, commit: str) -> Row:
    ours = [
        dataclasses.replace(contender, role="rival", name=f"{contender.name}, at {commit}")
        for contender in row.contenders
        if contender.role == "ours"
    ]
    return dataclasses.replace(row, contenders=ours)


def _in_turn(rounds: int) -> Iterator[int]:
    """Numbers of rounds, each when a line comes from standard input; a line tells its end."""
    for number in range(1, rounds + 1):
        sys.stdin.readline()
        yield number
        sys.stdout.write(DONE)
        sys.stdout.flush()


def _rotated(contenders: list[Contender], by: int) -> list[Contender]:
    first = by % max(1, len(contenders))
    return contenders[first:] + contenders[:first]


def _run_once(
    contender: Contender,
    context: Context,
    row: Row,
    memory: Memory,
    watcher: MemoryWatcher,
    kept: int,
) -> Measurement:
    contender.before()
    if memory == "touched":
        _touch(context, row)
    return measure(contender, row.bytes, watcher, kept)


def _touch(context: Context, row: Row) -> None:
    """Makes the host back enough free memory for any contender.

    Only memory that is free now, so that the page cache of a warm row stays.
    """
    free = environment.memory_field("MemFree")
    context.program.touch(min(row.memory * row.bytes, free * 9 // 10))


def _row_record(name: str, memory: Memory, row: Row) -> Record:
    return {
        "kind": "row",
        "row": name,
        "memory": memory,
        "title": row.title,
        "bytes": row.bytes,
        "tensors": row.tensors,
        "limit": row.limit,
        "bound": row.bound,
        "per_tensor": row.per_tensor,
        "figures": [dataclasses.asdict(figure) for figure in row.figures],
    }


def _record(kind: str, row: str, memory: Memory, contender: Contender, **more: Any) -> Record:
    return {
        "kind": kind,
        "row": row,
        "memory": memory,
        "contender": contender.name,
        "role": contender.role,
        "planner": contender.planner,
        "nesting": contender.nesting,
        **more,
    }


def _say(error: Exception, context: Context) -> str:
    text = f"{type(error).__name__}: {error}"
    text = text.replace(str(context.directory), "DIRECTORY")
    return text.replace(f"{environment.REPOSITORY}/", "")


def main(arguments: list[str]) -> int:
    """Runs one row and appends its records to a file, one line of JSON each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_row")
    parser.add_argument("row")
    parser.add_argument("--memory", choices=MEMORY_STATES, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--before", default="", help="ours here is of this earlier commit")
    parser.add_argument(
        "--in-turn", action="store_true", help="a round per line of input, no rivals"
    )
    options = parser.parse_args(arguments)

    import benchmarks.rows  # noqa: F401  registers the rows; imports torch

    rivals.quiet()
    context = Context(options.directory, options.scale, LimitsProgram(options.program))
    start = time.monotonic()
    with open(options.records, "a") as file:

        def emit(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            seconds = f"{time.monotonic() - start:6.0f} s"
            if record["kind"] == "measured":
                said = f"round {record['round']}  {record['contender']}: {record['seconds']:.3f} s"
            elif record["kind"] == "row":
                said = f"{record['title']}, memory {record['memory']}"
            else:
                said = f"{record['contender']} {record['kind']}: {record['reason']}"
            sys.stderr.write(f"{seconds}  {options.row}  {said}\n")

        turns = options.in_turn
        rounds = _in_turn(options.rounds) if turns else range(1, options.rounds + 1)
        run_row(options.row, context, options.memory, rounds, emit, options.before, not turns)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
