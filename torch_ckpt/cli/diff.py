"""torch-ckpt diff: what two checkpoints do not have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import click

from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.checkpoint import open as open_checkpoint
from torch_ckpt.cli.output import DIFFERENT, Output, count, printable, with_output
from torch_ckpt.cli.text import bold, columns, natural
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.merge import MEMORY_BUDGET
from torch_ckpt.options import parse_bytes

_TOLERANCE = click.FloatRange(min=0.0, max=1e300)
_LEAST_BUDGET = 64 << 20


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", type=_TOLERANCE, default=0.0, help="Relative tolerance of tensors.")
@click.option("--atol", type=_TOLERANCE, default=0.0, help="Absolute tolerance of tensors.")
@click.option("--names-only", is_flag=True, help="Compare names, shapes and dtypes, and no value.")
@click.option(
    "--memory-budget",
    default=MEMORY_BUDGET,
    show_default=True,
    help="Bytes that tensors take at most while they are compared, from 64MiB on.",
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
    where something differs. Imports torch.

    \b
    torch-ckpt diff run/step-1000 run/step-2000 --names-only
    torch-ckpt diff checkpoint exported --atol 1e-3
    """
    if math.isnan(rtol) or math.isnan(atol):
        raise click.UsageError("A tolerance is a number.")
    budget = parse_bytes(memory_budget, "memory_budget")
    if budget < _LEAST_BUDGET:
        raise InvalidArgumentError(f"memory_budget={memory_budget!r} is less than 64MiB")
    left, right = open_checkpoint(a), open_checkpoint(b)
    with output.progress("comparing") as progress:
        total = 0 if names_only else _bytes_of_both(left, right)
        done = 0

        def read(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done, total)

        tolerances = None if names_only else (rtol, atol)
        found = list(_differences(left, right, tolerances, budget, read))
    same = (
        len(left) + len(left.objects) - len({each["name"] for each in found if each["in"] != "b"})
    )
    output.report(
        {"a": left.path, "b": right.path, "same": same, "different": found},
        lambda: _text(found, same),
    )
    if found:
        raise SystemExit(DIFFERENT)


def _bytes_of_both(a: Checkpoint, b: Checkpoint) -> int:
    """Bytes of the tensors that are compared by their values."""
    return sum(
        a[name].nbytes + b[name].nbytes
        for name in a
        if name in b and a[name].shape == b[name].shape
    )


def _differences(
    a: Checkpoint,
    b: Checkpoint,
    tolerances: tuple[float, float] | None,
    budget: int,
    read: Callable[[int], None],
) -> Iterator[dict[str, Any]]:
    """{"name", "in": "a", "b" or "both", "what"} of every leaf that differs. `read` hears of bytes
    that were compared."""
    from torch_ckpt.dcp.load.statistics import differences
    from torch_ckpt.objects import object_digest

    objects = [each.objects for each in (a, b)]
    sides = [{*each, *leaves} for each, leaves in zip((a, b), objects, strict=True)]
    names = sorted(sides[0] | sides[1], key=natural)
    compared = differences(
        (
            (a[name], b[name])
            for name in names
            if tolerances and name in a and name in b and a[name].shape == b[name].shape
        ),
        *(tolerances or (0.0, 0.0)),
        budget=budget,
        read=read,
    )
    for name in names:
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
                number, largest = next(compared)
                if number:
                    of = count(left.shape.numel(), "value")
                    what.append(f"{number:,} of {of} differ, by {largest:.6g} at most")
        if what:
            yield {"name": name, "in": "both", "what": "; ".join(what)}


def _text(found: list[dict[str, Any]], same: int) -> str:
    rows = [(printable(each["name"]), printable(each["what"])) for each in found]
    lines = columns(rows, styles={0: bold})
    leaves = count(same, "leaf is", "leaves are")
    return "\n".join([*lines, f"{leaves} the same, {len(found):,} differ"])
