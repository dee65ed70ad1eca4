"""torch-ckpt clean: remove what killed saves have left, and old checkpoints."""

from __future__ import annotations

import os
from typing import Any

import click

from torch_ckpt.cli.output import (
    Output,
    count,
    fields_of,
    format_bytes,
    printable,
    with_output,
)
from torch_ckpt.cli.text import bold, columns
from torch_ckpt.errors import CheckpointError, ConflictError
from torch_ckpt.options import local_path
from torch_ckpt.runs.leftovers import Leftover, leftovers, tree_bytes

_DONE = {"remove": "removed", "finish": "finished", "keep": "kept"}


@click.command()
@click.argument("path", type=click.Path())
@click.option("--yes", is_flag=True, help="Remove it. Without this nothing is changed.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    help="Also remove whole checkpoints step-N but for this many of the newest.",
)
@with_output
def clean(path: str, yes: bool, keep_last: int | None, output: Output) -> None:
    """Show what may be removed from PATH, and remove it.

    PATH is a checkpoint or a directory of checkpoints. What may go is what saves, deletions and
    conversions that died have left, and checkpoints of torch_ckpt that are not whole, if a whole
    one of a later step is there. A commit that was interrupted is finished. What a running save
    owns stays, and so does what others wrote.

    \b
    torch-ckpt clean run
    torch-ckpt clean run --keep-last 3 --yes
    """
    root = local_path(path)
    found = leftovers(root, keep_last)
    first: Exception | None = None
    items = []
    for each in found:
        item = _fields(each)
        if yes and each.kept is None:
            try:
                item["reason"] = each.remove()
                if item["reason"] is None and os.path.lexists(each.path):
                    item.update(action="keep", reason="it is in use, or holds what others wrote")
                item["bytes"] -= tree_bytes(each.path)
            except ConflictError as error:
                item.update(action="keep", reason=error.message)
            except (CheckpointError, OSError) as error:
                gone = item["bytes"] - tree_bytes(each.path)
                if not os.path.lexists(each.path):
                    pass  # one recovery may do the work of several, and others may clean too
                elif gone > 0:
                    item.update(bytes=gone, reason=f"not all of it: {error}")
                    first = first or error
                else:
                    item.update(action="keep", reason=str(error))
                    first = first or error
        items.append(item)
    freed = sum(item["bytes"] for item in items if item["action"] == "remove")
    error_fields, status = fields_of(first) if first is not None else (None, 0)
    fields = {"path": root, "removed": yes, "bytes": freed, "items": items, "error": error_fields}
    output.report(fields, lambda: _text(fields))
    if error_fields is not None:
        output.error(error_fields)
        raise SystemExit(status)


def _fields(each: Leftover) -> dict[str, Any]:
    action = "keep" if each.kept else "finish" if each.finishes else "remove"
    return {
        "path": each.path,
        "what": each.what,
        "bytes": each.bytes,
        "action": action,
        "reason": each.kept,
    }


def _text(fields: dict[str, Any]) -> str:
    root, items = fields["path"], fields["items"]
    rows = []
    for item in items:
        where = os.path.relpath(item["path"], root)
        where = item["path"] if where.startswith("..") else where
        why = item["what"] + (f": {item['reason']}" if item["reason"] else "")
        size = format_bytes(item["bytes"])
        action = _DONE[item["action"]] if fields["removed"] else item["action"]
        rows.append((action, printable(where), size, printable(why)))
    lines = columns(rows, right={2}, styles={1: bold})
    going = [item for item in items if item["action"] != "keep"]
    said = f"{count(len(going), 'thing')}, {format_bytes(fields['bytes'])}"
    if not going:
        lines.append("nothing to remove")
    elif fields["removed"]:
        lines.append(f"removed or finished {said}")
    else:
        lines.append(f"would remove or finish {said}; --yes does it")
    return "\n".join(lines)
