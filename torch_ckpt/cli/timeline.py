"""torch-ckpt timeline: what each rank did in a save, and when."""

from __future__ import annotations

import shutil
from typing import Any

import click

from torch_ckpt.cli.output import Output, count, format_bytes, with_output
from torch_ckpt.cli.picture import check_picture_name, write_picture
from torch_ckpt.cli.save_log import PHASES, LoggedSave, RankSave, Span, read_logs
from torch_ckpt.cli.save_notes import heading, notes
from torch_ckpt.errors import InvalidArgumentError

# The character of a phase, and its colour on a terminal.
_LOOK = {
    "queue": (".", "bright_black"),
    "stage": ("s", "blue"),
    "plan": ("p", "yellow"),
    "write": ("w", "green"),
    "commit": ("c", "magenta"),
    "wait": ("-", "bright_black"),
    "unknown": ("?", "red"),
}
_NARROWEST = 24
_DRAWN = 50  # saves of a picture, at the most
_WAITING = ("queue", "wait", "unknown")


@click.command()
@click.argument("logs", metavar="LOG...", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Show the last N saves.",
)
@click.option("--png", type=click.Path(), metavar="FILE.png", help="Draw them too.")
@with_output
def timeline(logs: tuple[str, ...], last: int, png: str | None, output: Output) -> None:
    """Show what each rank did in a save, and when.

    A save with log_path= appends to LOG; each rank may have a file of its own. The commit is drawn
    for all ranks, which wait for it. Ranks of several nodes are put side by side by the clocks of
    these. --png needs matplotlib.

    \b
    torch-ckpt timeline saves.jsonl
    torch-ckpt timeline saves-rank*.jsonl --last 1 --png timeline.png
    """
    if png is not None:
        check_picture_name(png, ".png")
    found = read_logs(logs)
    shown = found[-last:]
    if png is not None:
        if len(shown) > _DRAWN:
            text = (
                f"{len(shown):,} saves are too many for a picture: use --last, of {_DRAWN} at most"
            )
            raise InvalidArgumentError(text)
        from torch_ckpt.cli.timeline_png import draw

        write_picture(png, draw(shown))
    fields = {"saves": [_fields(save) for save in shown], "count": len(found), "png": png}
    output.report(fields, lambda: _text(shown, len(found)))


def _fields(save: LoggedSave) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "error": save.ranks[rank].error,
            "written_bytes": save.ranks[rank].written_bytes,
            "phases": [
                {"phase": span.phase, "begin": span.begin, "seconds": span.seconds}
                for span in save.spans(rank)
            ],
        }
        for rank in sorted(save.ranks)
    ]
    head = {"path": save.path, "world_size": save.world_size}
    return {**head, "started": save.started, "seconds": save.seconds, "ranks": ranks}


def _text(saves: list[LoggedSave], in_all: int) -> str:
    if not saves:
        return "no saves"
    width = shutil.get_terminal_size((100, 24)).columns
    lines = []
    if len(saves) < in_all:
        lines += [f"the last {len(saves):,} of {count(in_all, 'save')}", ""]
    for save in saves:
        lines += [*_save_lines(save, width), ""]
    there = {span.phase for save in saves for each in save.ranks.values() for span in each.spans}
    lines += [
        f"{click.style(*_style(phase))} {meaning}"
        for phase, meaning in PHASES.items()
        if phase in there
    ]
    return "\n".join(lines)


def _style(phase: str, length: int = 1) -> tuple[str, str]:
    character, colour = _LOOK[phase]
    return character * length, colour


def _save_lines(save: LoggedSave, width: int) -> list[str]:
    there = {span.phase for each in save.ranks.values() for span in each.spans}
    columns = [phase for phase in PHASES if phase in there]
    rows = [["rank"], *([str(rank)] for rank in sorted(save.ranks))]
    cells = [[*columns, "written"]]
    cells += [_cells(save.ranks[rank], columns) for rank in sorted(save.ranks)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    left = max(len(row[0]) for row in rows)
    bar = max(_NARROWEST, width - left - 2 - sum(widths) - 2 * len(widths))
    scale = f"0 s{f'{save.seconds:.3g} s':>{bar - 3}}"
    bars = [scale, *(_bar(save.spans(rank), save.seconds, bar) for rank in sorted(save.ranks))]
    out = [heading(save)]
    for row, drawn, numbers in zip(rows, bars, cells, strict=True):
        aligned = "  ".join(f"{cell:>{each}}" for cell, each in zip(numbers, widths, strict=True))
        out.append(f"{row[0]:>{left}}  {drawn}  {aligned}".rstrip())
    return [*out, *notes(save)]


def _cells(line: RankSave, columns: list[str]) -> list[str]:
    seconds = [line.seconds(phase) for phase in columns]
    written = "" if line.written_bytes is None else format_bytes(line.written_bytes)
    return [*("" if each is None else f"{each:.3f}" for each in seconds), written]


def _bar(spans: list[Span], seconds: float, width: int) -> str:
    """Each character is the phase that has most of its share of the time; but every phase has one
    that is no waiting."""
    if not seconds:  # shorter than what times since 1970 can tell
        return " " * width
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        begin, end = (at / seconds * width for at in (span.begin, span.begin + span.seconds))
        for at in range(int(begin), min(width, int(end) + 1)):
            share = min(end, at + 1) - max(begin, at)
            if share > 0:
                shares[at][span.phase] = shares[at].get(span.phase, 0.0) + share
    phases = [max(share, key=lambda phase: share[phase], default="") for share in shares]
    for span in reversed(spans):
        if span.phase in (*_WAITING, *phases):
            continue
        at = min(width - 1, int((span.begin + span.seconds / 2) / seconds * width))
        while at > 0 and phases[at] not in _WAITING and phases.count(phases[at]) == 1:
            at -= 1
        phases[at] = span.phase
    out, at = "", 0
    while at < width:
        end = at
        while end < width and phases[end] == phases[at]:
            end += 1
        if phases[at]:
            text, colour = _style(phases[at], end - at)
            out += click.style(text, fg=colour)
        else:
            out += " " * (end - at)
        at = end
    return out
