"""A timeline as a picture. Imports matplotlib."""

from __future__ import annotations

import io

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torch_ckpt.cli.save_log import PHASES, LoggedSave
from torch_ckpt.cli.save_notes import heading, notes

_COLOURS = {
    "queue": "#c7c7c7",
    "stage": "#1f77b4",
    "plan": "#ff9f1c",
    "write": "#2ca02c",
    "commit": "#8e44ad",
    "wait": "#ececec",
    "unknown": "#f4b6b6",
}
_ROW, _HIGHEST = 0.28, 9.0  # inches: of a rank, and of all ranks of a save


def draw(saves: list[LoggedSave]) -> bytes:
    """A PNG: for each save a row for each rank."""
    heights = [min(_HIGHEST, 0.4 + _ROW * len(save.ranks)) for save in saves] or [1.0]
    figure = Figure(figsize=(9, sum(heights) + 0.95 * len(heights) + 0.4), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if not saves:
        axes[0].text(0.5, 0.5, "no saves", ha="center", va="center")
        axes[0].set_axis_off()
    there: set[str] = set()
    for axis, save in zip(axes, saves, strict=False):
        ranks = sorted(save.ranks)
        bars: dict[str, list[list[tuple[float, float]]]] = {}  # their corners
        for row, rank in enumerate(ranks):
            for span in save.spans(rank):
                (x, end), (y, below) = (
                    (span.begin, span.begin + span.seconds),
                    (row - 0.4, row + 0.4),
                )
                bars.setdefault(span.phase, []).append([(x, y), (end, y), (end, below), (x, below)])
        for phase, corners in bars.items():
            axis.add_collection(PolyCollection(corners, color=_COLOURS[phase]))
        there.update(bars)
        step = 1 + (len(ranks) - 1) // int(_HIGHEST / 0.16)
        axis.set_yticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
        axis.set_ylim(len(ranks) - 0.4, -0.6)
        axis.set_xlim(0, save.seconds or 1)
        axis.set_ylabel("rank")
        axis.set_xlabel(_plain("; ".join(["seconds", *notes(save)])), wrap=True)
        axis.set_title(_plain(heading(save)), loc="left", fontsize=10, wrap=True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[
            Patch(color=_COLOURS[phase], label=meaning)
            for phase, meaning in PHASES.items()
            if phase in there
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _plain(text: str) -> str:
    """`text` for matplotlib, which takes what is between two dollar signs for a formula. Its
    parse_math=False does not hold for text that is wrapped."""
    return text.replace("$", r"\$")
