"""torch-ckpt diff: what two checkpoints do not have in common."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from torch_ckpt.checkpoint.values import compare
from torch_ckpt.cli.leaves import leaves_of, values_of
from torch_ckpt.cli.output import DIFFERENT, Output, count, printable, with_output
from torch_ckpt.cli.text import bold, columns, natural
from torch_ckpt.errors import CheckpointError, InvalidArgumentError
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.options import parse_bytes

_TOLERANCE = click.FloatRange(min=0.0, max=1e300)
_LEAST_BUDGET = 32 << 20


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", type=_TOLERANCE, default=0.0, help="Relative tolerance of tensors.")
@click.option("--atol", type=_TOLERANCE, default=0.0, help="Absolute tolerance of tensors.")
@click.option("--names-only", is_flag=True, help="Compare names, shapes and dtypes, and no value.")
@click.option(
    "--memory-budget",
    default="64MiB",
    show_default=True,
    help="Bytes that tensors take at most while they are compared, from 32MiB on.",
)
@with_output
def diff(
    a: str,
    b: str,
    rtol: float,
    atol: float,
    names_only: bool,
    memory_budget: str,
    output: Output,
) -> None:
    """Compare the leaves of the checkpoints A and B.

    They may be of any formats and shardings. Tensors are compared bit by bit, or within --rtol and
    --atol, in pieces; of the containers that leaves stand in only their names count. Exit status 4
    where something differs, or cannot be compared.

    \b
    torch-ckpt diff run/step-1000 run/step-2000 --names-only
    torch-ckpt diff checkpoint exported --atol 1e-3
    """
    if math.isnan(rtol) or math.isnan(atol):
        raise click.UsageError("A tolerance is a number.")
    budget = parse_bytes(memory_budget, "memory_budget")
    if budget < _LEAST_BUDGET:
        raise InvalidArgumentError(f"memory_budget={memory_budget!r} is less than 32MiB")
    left, right = _Side(a), _Side(b)
    names = sorted({*left.leaves, *right.leaves}, key=natural)
    both = [name for name in names if name in left.leaves and name in right.leaves]
    differences: dict[str, str] = {}
    if not names_only:
        with output.progress("comparing") as progress:
            differences = _of_tensors(left, right, both, (rtol, atol), budget, progress)
        differences.update(_of_objects(left, right, both))
    found = list(_found(left, right, names, differences))
    same = len(left.leaves) - sum(each["in"] != "b" for each in found)
    output.report(
        {"a": left.path, "b": right.path, "same": same, "different": found},
        lambda: _text(found, same),
    )
    if found:
        raise SystemExit(DIFFERENT)


class _Side:
    """One of the two checkpoints. leaves: those of `leaves_of`, by their names."""

    def __init__(self, path: str) -> None:
        self.opened = OpenedCheckpoint(path)
        self.path = self.opened.path
        self.listing = self.opened.listing()
        self.leaves = {leaf["name"]: leaf for leaf in leaves_of(self.listing)}

    def typed(self, names: list[str]) -> dict[str, Any]:
        """`values_of` of leaves that are no tensors."""
        return values_of(self.opened, self.listing, set(names))

    @functools.cached_property
    def objects(self) -> Mapping[str, Any]:
        """All of these, see StoredObjects. Needs torch."""
        from torch_ckpt.calls.stored import StoredObjects

        return StoredObjects(self.opened, self.listing, verify=True)


def _of_tensors(
    a: _Side,
    b: _Side,
    names: list[str],
    tolerances: tuple[float, float],
    budget: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, str]:
    """What is to be said of each of the tensors of equal shapes whose values differ."""
    shapes = [{name: side.leaves[name]["shape"] for name in names} for side in (a, b)]
    unread = [name for name in names if any(side.leaves[name]["unread"] for side in (a, b))]
    names = [name for name in names if shapes[0][name] == shapes[1][name] is not None]
    names = [name for name in names if name not in unread]
    total = sum(side.leaves[name]["bytes"] for name in names for side in (a, b))
    compared = compare(
        a.opened,
        b.opened,
        names,
        rtol=tolerances[0],
        atol=tolerances[1],
        memory=budget,
        progress=progress and (lambda done, _: progress(done, total)),
    )
    said = {
        name: f"cannot be compared: {a.leaves[name]['unread'] or b.leaves[name]['unread']}"
        for name in unread
    }
    for name, (number, largest) in zip(names, compared, strict=True):
        if number:
            of = count(math.prod(a.leaves[name]["shape"]), "value")
            how = f"by {largest:.6g} at most" if largest else "in their bits only"
            said[name] = f"{number:,} of {of} {'differs' if number == 1 else 'differ'}, {how}"
    return said


def _of_objects(a: _Side, b: _Side, names: list[str]) -> dict[str, str]:
    """The same of leaves that are no tensors in both."""
    names = [n for n in names if a.leaves[n]["dtype"] is None and b.leaves[n]["dtype"] is None]
    typed = [side.typed(names) for side in (a, b)]
    said = {}
    for name in names:
        pair = [values.get(name, ()) for values in typed]
        if all(type(value) in _SCALARS for value in pair):
            if json.dumps(pair[0]) != json.dumps(pair[1]):
                said[name] = _both(*pair)
            continue
        texts = [_text_of(value) for value in pair]
        if texts[0] is not None and texts[0] == texts[1]:
            continue
        try:
            text = _of_decoded(a, b, name)
        except CheckpointError as error:
            text = f"cannot be compared: {error.message}"
        if text is not None:
            said[name] = text
    return said


_SCALARS = (type(None), bool, int, float, str)


def _text_of(typed: Any) -> str | None:
    """Of a value of `values_of` a text that no other value has; None where there is none."""
    if typed == () or isinstance(typed, Exception):
        return None
    text = json.dumps(typed)
    return None if '"at"' in text else text  # it may have bytes in a file beside


def _of_decoded(a: _Side, b: _Side, name: str) -> str | None:
    """What is to be said of two values, which are compared as they would be saved."""
    values = [side.objects[name] for side in (a, b)]
    from torch_ckpt.objects import object_digest

    if object_digest(values[0], name) == object_digest(values[1], name):
        return None
    return _both(*values)


_MOST = 80  # characters of a value


def _both(a: Any, b: Any) -> str:
    """Two values that differ, cut where they are long."""
    texts = [repr(value) for value in (a, b)]
    cut = [text if len(text) <= _MOST else text[: _MOST - 3] + "..." for text in texts]
    if cut[0] != cut[1]:
        return " and ".join(cut)
    same = next((n for n, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), 0)
    return f"{cut[0]}, which differ from character {same + 1:,} on"


def _found(
    a: _Side, b: _Side, names: list[str], differences: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """{"name", "in": "a", "b" or "both", "what"} of every leaf that differs."""
    for name in names:
        if not (name in a.leaves and name in b.leaves):
            where = "a" if name in a.leaves else "b"
            yield {"name": name, "in": where, "what": f"only in {where.upper()}"}
            continue
        left, right = a.leaves[name], b.leaves[name]
        what = []
        if (left["dtype"] is None) != (right["dtype"] is None):
            what = [f"a tensor in {'A' if right['dtype'] is None else 'B'} only"]
        else:
            if left["dtype"] != right["dtype"]:
                what.append(f"{left['dtype']} and {right['dtype']}")
            if left["shape"] != right["shape"]:
                what.append(f"shapes {left['shape']} and {right['shape']}")
            if name in differences:
                what.append(differences[name])
        if what:
            yield {"name": name, "in": "both", "what": "; ".join(what)}


def _text(found: list[dict[str, Any]], same: int) -> str:
    rows = [(printable(each["name"]), printable(each["what"])) for each in found]
    lines = columns(rows, styles={0: bold})
    leaves = count(same, "leaf is", "leaves are")
    return "\n".join([*lines, f"{leaves} the same, {len(found):,} differ"])
