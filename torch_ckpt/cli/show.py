"""torch-ckpt show: one leaf of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from torch_ckpt.checkpoint.checkpoint import open as open_checkpoint
from torch_ckpt.cli.output import Output, format_bytes, printable, with_output
from torch_ckpt.errors import IncompleteError
from torch_ckpt.native.progress import Progress

if TYPE_CHECKING:
    from torch_ckpt.calls.stored import StoredTensor

_CORNER = 6  # values of a dimension that are shown
_MOST_SHOWN = 20_000  # characters of what is no tensor


@click.command()
@click.argument("path", type=click.Path())
@click.argument("fqn")
@click.option("--format", help="What PATH is read as: torch_ckpt, hf, dcp, megatron or torch.")
@with_output
def show(path: str, fqn: str, format: str | None, output: Output) -> None:
    """Show the leaf FQN of the checkpoint PATH.

    Of a tensor: its first values, the least, the largest and the mean of all that are finite, and
    how many are not. It is read in pieces. Imports torch.

    \b
    torch-ckpt show checkpoint model.layers.0.weight
    torch-ckpt show run/step-1000 optimizer.param_groups.0.lr
    """
    checkpoint = open_checkpoint(path, format=format)
    if fqn in checkpoint:
        with output.progress("reading") as progress:
            fields = _of_tensor(checkpoint[fqn], progress)
        output.report(fields, lambda: _text(fields))
        return
    objects = checkpoint.objects
    if fqn not in objects:
        raise IncompleteError("is not in the checkpoint", file=checkpoint.path, tensor=fqn)
    value = objects[fqn]
    fields = {"name": fqn, "type": type(value).__name__, "value": repr(value)}
    output.report(fields, lambda: _text_of_object(fields))


def _text_of_object(fields: dict[str, Any]) -> str:
    value = fields["value"]
    lines = [f"{fields['name']}  {fields['type']}", *value[:_MOST_SHOWN].split("\n")]
    if len(value) > _MOST_SHOWN:
        lines.append(f"... and {len(value) - _MOST_SHOWN:,} characters more; --json has all")
    return "\n".join(map(printable, lines))


def _of_tensor(stored: StoredTensor, progress: Progress | None) -> dict[str, Any]:
    numbers = stored.statistics(progress)
    outer = [slice(0, 1)] * max(0, len(stored.shape) - 2)
    inner = [slice(0, _CORNER)] * min(2, len(stored.shape))
    index = tuple(outer + inner)
    cut = [part.stop < size for part, size in zip(index, stored.shape, strict=True)]
    return {
        "name": stored.name,
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": list(stored.shape),
        "bytes": stored.nbytes,
        **numbers,
        "first": _with_dots(str(stored[index]), cut) if stored.nbytes else str(stored[index]),
    }


def _with_dots(text: str, cut: list[bool]) -> str:
    """The text of a tensor, with dots at the end of each dimension that is `cut`."""
    out, depth = "", 0
    for character in text:
        if character == "]":
            depth -= 1
            if cut[depth]:
                lines = len(cut) - 1 - depth  # as torch sets the elements of a dimension apart
                indent = " " * (len("tensor(") + depth + 1)
                out += "," + ("\n" * lines + indent if lines else " ") + "..."
        elif character == "[":
            depth += 1
        out += character
    return out


def _text(fields: dict[str, Any]) -> str:
    size = format_bytes(fields["bytes"])
    lines = [f"{printable(fields['name'])}  {fields['dtype']}{fields['shape']}  {size}"]
    for key in ("min", "max", "mean", "nan", "inf"):
        if fields[key] is not None:
            lines.append(f"  {key:4}  {fields[key]}")
    return "\n".join([*lines, fields["first"]])
