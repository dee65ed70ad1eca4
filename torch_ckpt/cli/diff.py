"""torch-ckpt diff: what two checkpoints do not have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import click

from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.checkpoint import open as open_checkpoint
from torch_ckpt.cli.ls import natural
from torch_ckpt.cli.output import DIFFERENT, Output, count, printable, with_output

_TOLERANCE = click.FloatRange(min=0.0, max=1e300)


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", type=_TOLERANCE, default=0.0, help="Relative tolerance of tensors.")
@click.option("--atol", type=_TOLERANCE, default=0.0, help="Absolute tolerance of tensors.")
@click.option("--names-only", is_flag=True, help="Compare names, shapes and dtypes, and no value.")
@with_output
def diff(a: str, b: str, rtol: float, atol: float, names_only: bool, output: Output) -> None:
    """Compare the leaves of the checkpoints A and B, of whatever formats and shardings.

    Tensors are compared bit by bit, or within --rtol and --atol, in pieces; of the containers that
    leaves stand in only their names count. Exit status 4 where something differs. Imports torch.

    \b
    torch-ckpt diff checkpoint exported --atol 1e-3
    """
    if math.isnan(rtol) or math.isnan(atol):
        raise click.UsageError("A tolerance is a number.")
    left, right = open_checkpoint(a), open_checkpoint(b)
    tolerances = None if names_only else (rtol, atol)
    found = list(_differences(left, right, tolerances))
    same = (
        len(left) + len(left.objects) - len({each["name"] for each in found if each["in"] != "b"})
    )
    output.report(
        {"a": left.path, "b": right.path, "same": same, "different": found},
        lambda: _text(found, same),
    )
    if found:
        raise SystemExit(DIFFERENT)


def _differences(
    a: Checkpoint, b: Checkpoint, tolerances: tuple[float, float] | None
) -> Iterator[dict[str, Any]]:
    """{"name", "in": "a", "b" or "both", "what"} of every leaf that differs."""
    from torch_ckpt.dcp.load.statistics import differences
    from torch_ckpt.objects import object_digest

    objects = [each.objects for each in (a, b)]
    sides = [{*each, *leaves} for each, leaves in zip((a, b), objects, strict=True)]
    for name in sorted(sides[0] | sides[1], key=natural):
        if not (name in sides[0] and name in sides[1]):
            where = "a" if name in sides[0] else "b"
            yield {"name": name, "in": where, "what": f"only in {where.upper()}"}
            continue
        what = []
        if (name in a) != (name in b):
            what.append("a tensor in one of them only")
        elif name not in a:
            if tolerances is not None:
                values = [leaves[name] for leaves in objects]
                digests = [object_digest(value, name) for value in values]
                if digests[0] != digests[1]:
                    what.append(" and ".join(f"{value!r:.80}" for value in values))
        else:
            left, right = a[name], b[name]
            if left.dtype != right.dtype:
                what.append(f"{left.dtype} and {right.dtype}".replace("torch.", ""))
            if left.shape != right.shape:
                what.append(f"shapes {list(left.shape)} and {list(right.shape)}")
            elif tolerances is not None:
                number, largest = differences(left, right, *tolerances)
                if number:
                    of = count(left.shape.numel(), "value")
                    what.append(f"{number:,} of {of} differ, by {largest:.6g} at most")
        if what:
            yield {"name": name, "in": "both", "what": "; ".join(what)}


def _text(found: list[dict[str, Any]], same: int) -> str:
    width = max((len(printable(each["name"])) for each in found), default=0)
    lines = [f"{printable(each['name']):{width}}  {printable(each['what'])}" for each in found]
    leaves = count(same, "leaf is", "leaves are")
    return "\n".join([*lines, f"{leaves} the same, {len(found):,} differ"])
