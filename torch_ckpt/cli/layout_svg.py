"""The picture of a layout: SVG as text."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from html import escape

from torch_ckpt.cli.output import format_bytes, printable
from torch_ckpt.cli.plane import Box, Plane, Rectangle, Slice, name_of, owners_of

_WIDE, _HIGH = 560, 400  # of a plane, in pixels, at the most
_NARROW, _LOW = 140, 48  # at the least: a thin tensor is drawn thicker than it is
_LEFT, _ROW, _FONT, _CHARACTER = 84, 18, 12, 7.0
_LEGEND = 64  # owners that it names, at the most
_FEW = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2"),
    *("#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"),
)


def colours_of(owners: Sequence[int | str]) -> dict[int | str, str]:
    """A colour for each; neighbours differ in lightness too where there are many."""
    if len(owners) <= len(_FEW):
        return dict(zip(owners, _FEW, strict=False))
    hues = {}
    for at, owner in enumerate(owners):
        light = (0.62, 0.48, 0.74)[at % 3]
        red, green, blue = colorsys.hls_to_rgb(at / len(owners) * 0.92, light, 0.6)
        hues[owner] = "#" + "".join(f"{round(each * 255):02x}" for each in (red, green, blue))
    return hues


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(printable(text))}</text>'


def _width(text: str) -> float:
    return len(text) * _CHARACTER


def svg(title: str, plane: Plane, slices: Sequence[Slice], boxes: Sequence[Box]) -> str:
    """A picture of the slices, one below the other, with a legend of the owners.

    Every rectangle of a box has the class "box", and says in a <title> what it is.
    """
    owners = owners_of(boxes)
    colours = colours_of(owners)
    wide, high = _size(plane)
    y = 26.0
    out = [_text(12, y, title, ' font-weight="bold"')]
    notes = [note for note in (plane.note(), _left_out(plane, slices)) if note]
    for note in notes:
        y += _ROW
        out.append(_text(12, y, note, ' fill="#555"'))
    for part in slices:
        y += 2 * _ROW
        if plane.columns is not None:
            label = ", ".join(filter(None, (f"dimension {plane.columns}", part.label())))
            out.append(_text(_LEFT, y, label, ' fill="#555"'))
        y += 8
        out += _panel(part, plane, colours, (_LEFT, y, wide, high))
        y += high + _ROW
    y += 1.5 * _ROW
    legend, across, y = _legend(owners, colours, y)
    out += legend
    widest = max(_LEFT + wide + 60, across, *(24 + _width(text) for text in (title + "  ", *notes)))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {widest:.0f} {y:.0f}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="{_FONT}" fill="#222">',
            f'<rect width="{widest:.0f}" height="{y:.0f}" fill="white"/>',
            *out,
            "</svg>\n",
        ]
    )


def _left_out(plane: Plane, slices: Sequence[Slice]) -> str:
    if len(slices) < plane.count:
        return f"the first {len(slices)} of {plane.count:,} slices are drawn"
    return ""


def _size(plane: Plane) -> tuple[float, float]:
    """Pixels, in the proportion of the plane as far as that can be seen."""
    ratio = plane.height / plane.width if plane.width else 1.0
    if plane.rows is None:
        return (_WIDE, _LOW) if plane.columns is not None else (_NARROW, _NARROW)
    high = min(_HIGH, max(_LOW, _WIDE * ratio))
    wide = min(_WIDE, max(_NARROW, high / ratio if ratio else _WIDE))
    return round(wide), round(high)


def _panel(
    part: Slice,
    plane: Plane,
    colours: dict[int | str, str],
    frame: tuple[float, float, float, float],
) -> list[str]:
    left, top, wide, high = frame
    out = []
    for rectangle in part.rectangles:
        out += _rectangle(rectangle, plane, colours[rectangle.box.owner], frame)
    out.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        'fill="none" stroke="#222"/>'
    )
    if not (plane.width and plane.height):
        out.append(
            _text(left + wide / 2, top + high / 2 + 4, "no elements", ' text-anchor="middle"')
        )
    if plane.columns is not None:
        borders = (each for rectangle in part.rectangles for each in rectangle.columns)
        for border, x in _ticks(borders, plane.width, wide, horizontal=True):
            out.append(_tick(left + x, top + high, 0, 5))
            out.append(_text(left + x, top + high + 17, f"{border:,}", ' text-anchor="middle"'))
    if plane.rows is not None:
        borders = (each for rectangle in part.rectangles for each in rectangle.rows)
        for border, at in _ticks(borders, plane.height, high, horizontal=False):
            out.append(_tick(left, top + at, -5, 0))
            out.append(_text(left - 8, top + at + 4, f"{border:,}", ' text-anchor="end"'))
        middle = top + high / 2
        turned = f' text-anchor="middle" fill="#555" transform="rotate(-90 14 {middle:.1f})"'
        out.append(_text(14, middle, f"dimension {plane.rows}", turned))
    return out


def _tick(x: float, y: float, right: float, down: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}l{right} {down}" stroke="#222"/>'


def _rectangle(
    rectangle: Rectangle, plane: Plane, colour: str, frame: tuple[float, float, float, float]
) -> list[str]:
    left, top, full_width, full_height = frame
    (row, row_end), (column, column_end) = rectangle.rows, rectangle.columns
    if not (plane.width and plane.height and row_end > row and column_end > column):
        return []
    x, wide = (each / plane.width * full_width for each in (column, column_end - column))
    y, high = (each / plane.height * full_height for each in (row, row_end - row))
    # A border would hide what is thin.
    border = ' stroke="white" stroke-width="1"' if min(wide, high) > 5 else ""
    box = rectangle.box
    told = f"{name_of(box.owner)}: {list(box.offsets)} + {list(box.sizes)}, "
    told += f"{format_bytes(box.bytes)}, {box.file} at byte {box.at:,}"
    out = [
        f'<rect class="box" x="{left + x:.4f}" y="{top + y:.4f}" width="{wide:.4f}" '
        f'height="{high:.4f}" fill="{colour}"{border}>'
        f"<title>{escape(printable(told))}</title></rect>"
    ]
    for label in (name_of(box.owner), str(box.owner)):
        if _width(label) + 4 < wide and high > _FONT + 2:
            where = left + x + wide / 2, top + y + high / 2 + 4
            ink = "white" if _is_dark(colour) else "#222"
            out.append(_text(*where, label, f' text-anchor="middle" fill="{ink}"'))
            break
    return out


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _ticks(
    borders: Iterable[int], size: int, pixels: float, *, horizontal: bool
) -> list[tuple[int, float]]:
    """The ends of the axis, and of the borders between as many as there is room for."""
    out = [(0, 0.0), (size, pixels)] if size else [(0, 0.0)]
    for border in sorted(set(borders) - {0, size}):
        at = border / size * pixels

        def room(other: int, border: int = border) -> float:
            wide = _width(f"{max(border, other):,}") + 10
            return wide if horizontal else _FONT + 2

        if all(abs(at - there) >= room(other) for other, there in out):
            out.append((border, at))
    return out


def _legend(
    owners: Sequence[int | str], colours: dict[int | str, str], y: float
) -> tuple[list[str], float, float]:
    """What it draws, and how far it reaches to the right and down."""
    step = 1 + (len(owners) - 1) // _LEGEND
    named = owners[::step]
    column = max((_width(name_of(owner)) for owner in named), default=0) + 34
    per_row = max(1, int((_LEFT + _WIDE) // column))
    out = []
    for at, owner in enumerate(named):
        x = 12 + at % per_row * column
        top = y + at // per_row * _ROW
        out.append(
            f'<rect x="{x:.1f}" y="{top - 10:.1f}" width="12" height="12" fill="{colours[owner]}"/>'
        )
        out.append(_text(x + 18, top, name_of(owner)))
    y += (max(1, len(named)) - 1) // per_row * _ROW
    if len(named) < len(owners):
        y += _ROW
        out.append(_text(12, y, f"one in {step} of {len(owners):,}", ' fill="#555"'))
    return out, 12 + min(per_row, max(1, len(named))) * column, y + 14
