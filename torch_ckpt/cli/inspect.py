"""torch-ckpt inspect: what is in a checkpoint, in a file of one, or in a directory of several."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from typing import Any

import click

from torch_ckpt.checkpoint.description import entries_of, topology_of
from torch_ckpt.checkpoint.metadata import decoded
from torch_ckpt.cli.leaves import cells_of, count_objects, leaves_of, with_values
from torch_ckpt.cli.output import Output, count, format_bytes, printable, with_output
from torch_ckpt.cli.shard_file import checkpoint_around, file_fields, file_text
from torch_ckpt.cli.steps import find_steps, step_of, steps_text
from torch_ckpt.cli.text import bold, columns, dim
from torch_ckpt.cli.tree import tree_lines
from torch_ckpt.errors import IncompleteError
from torch_ckpt.native.opened import ListedFile, Listing, OpenedCheckpoint
from torch_ckpt.options import local_path

_SOURCES = {
    "manifest": "written by torch_ckpt",
    "index": "read by its index",
    "headers": "read by the headers of its .safetensors files",
    "dcp": "written by stock DCP, read by its .metadata",
    "megatron": "written by Megatron Core, read by its .metadata",
    "torch": "written by torch.save",
}
_FILES_SHOWN = 24
_LONGEST_VALUE = 200  # of metadata


@click.command()
@click.argument("path", type=click.Path())
@click.option("--tensors", is_flag=True, help="List every tensor and every other leaf.")
@click.option("--tree", is_flag=True, help="Show the names as a tree, with counts and sizes.")
@click.option("--depth", type=click.IntRange(min=1), help="Show a tree of this many levels.")
@click.option("--steps", is_flag=True, help="List the checkpoints in PATH, even if it is one too.")
@click.option("--format", help="What PATH is read as: torch_ckpt, hf, dcp, megatron or torch.")
@with_output
def inspect(
    path: str,
    tensors: bool,
    tree: bool,
    depth: int | None,
    steps: bool,
    format: str | None,
    output: Output,
) -> None:
    """Show what PATH holds.

    Of a checkpoint: format, step, tensors and bytes by dtype, files, and how evenly the bytes are
    shared out. Of a file of one: the boxes in it. Of a directory of checkpoints: one line for each,
    by steps, with its state. Reads headers only; 'verify' reads the data, 'ls' lists names, 'show'
    shows values.

    \b
    torch-ckpt inspect run
    torch-ckpt inspect run/step-1000 --tree --depth 2
    torch-ckpt inspect run/step-1000/shard-00001-model-00001-of-00001.safetensors
    """
    if steps:
        found = find_steps(path)
        if not found:
            raise IncompleteError("holds no checkpoints", file=local_path(path))
        _report_steps(path, found, output)
        return
    if format is None and (around := checkpoint_around(path)):
        of_file = file_fields(*around)
        output.report(of_file, lambda: file_text(of_file))
        return
    try:
        opened = OpenedCheckpoint(path, format)
    except IncompleteError:
        if format is None and os.path.isdir(path) and (found := find_steps(path)):
            _report_steps(path, found, output)
            return
        raise
    tree = tree or depth is not None
    listing = opened.listing(whole=tensors, tensors=tensors or tree, check_files=True)
    fields = _fields(opened, listing)
    leaves: list[dict[str, Any]] = []
    if tensors or tree:
        leaves = with_values(opened, listing, leaves_of(listing))
    if tensors:
        fields.update(_every_leaf(listing, leaves))
    if tree and output.as_json:
        fields["leaves"] = leaves
    output.report(fields, lambda: "\n".join(_lines(fields, leaves, tree, depth)))


def _report_steps(path: str, steps: list[dict[str, Any]], output: Output) -> None:
    fields = {"path": local_path(path), "steps": steps}
    output.report(fields, lambda: steps_text(fields))


def _fields(opened: OpenedCheckpoint, listing: Listing) -> dict[str, Any]:
    """What the report says: nothing here is done for each tensor in Python."""
    files = opened.files()
    dtypes = sorted(
        listing.dtypes.items(), key=lambda each: (-each[1]["bytes"], each[0])
    )  # what takes most bytes first
    return {
        "path": opened.path,
        "format": listing.format,
        "source": listing.source,
        "step": step_of(opened, listing),
        "save_id": listing.save_id or None,
        "world_size": listing.world_size,
        "metadata": decoded(listing.metadata),
        "files": [file._asdict() for file in files],
        "beside": listing.beside,
        "notes": listing.notes,
        "unread": listing.unread,
        "balance": _balance(listing.world_size, files),
        "tensor_count": listing.tensor_count,
        "tensor_bytes": sum(each["bytes"] for _, each in dtypes),
        "dtypes": dict(dtypes),
        "object_count": count_objects(listing),
    }


def _balance(world_size: int | None, files: list[ListedFile]) -> dict[str, Any] | None:
    """How the bytes of data files are shared out among ranks, or else files; None of a single
    one. "ratio": the largest to the mean, 1.0 where all are alike."""
    data = {file.name: file.bytes for file in files if file.role == "data"}
    ranks = topology_of(world_size, data).ranks
    if data and ranks.keys() == data.keys():
        sizes: Counter[int] = Counter()
        for name, size in data.items():
            sizes[ranks[name]] += size
        of, shares = "rank", list(sizes.values())
        # By the names of files there may be any number of ranks, most of them without bytes.
        number = max(world_size or 0, 1 + max(ranks.values()))
    else:
        of, shares, number = "file", list(data.values()), len(data)
    if number < 2 or not sum(shares):
        return None
    return {
        "of": of,
        "count": number,
        "min": min(shares) if len(shares) == number else 0,
        "max": max(shares),
        "ratio": round(max(shares) * number / sum(shares), 3),
    }


def _every_leaf(listing: Listing, leaves: list[dict[str, Any]]) -> dict[str, Any]:
    tensors, objects = entries_of(listing)
    values = {leaf["name"]: leaf["value"] for leaf in leaves}
    return {
        "tensors": [dataclasses.asdict(tensor) for tensor in tensors],
        "objects": [
            {**dataclasses.asdict(leaf), "value": values[leaf.name]}
            for leaf in objects
            if leaf.name in values  # of what the user saved
        ],
    }


def _lines(
    fields: dict[str, Any], leaves: list[dict[str, Any]], tree: bool, depth: int | None
) -> list[str]:
    what = f"{fields['format']}, {_SOURCES.get(fields['source'], fields['source'])}"
    lines = [f"{bold(printable(fields['path']))}: {what}"]
    known = [f"step {fields['step']}"] if fields["step"] is not None else []
    if fields["save_id"] is not None:
        known.append(f"save {fields['save_id']}, by {count(fields['world_size'] or 1, 'rank')}")
    if known:
        lines.append(f"  {', '.join(known)}")
    for name, value in fields["metadata"].items():
        if name != "step":
            said = printable(json.dumps(value, ensure_ascii=False))
            more = " ..., --json shows all" if len(said) > _LONGEST_VALUE else ""
            lines.append(f"  {printable(name)}: {said[:_LONGEST_VALUE]}{more}")
    dtypes = fields["dtypes"]
    size = format_bytes(fields["tensor_bytes"])
    said = ", ".join(f"{dtype} {format_bytes(each['bytes'])}" for dtype, each in dtypes.items())
    if len(dtypes) < 2:
        said = "".join(dtypes)
    tensors = count(fields["tensor_count"], "tensor")
    lines.append(f"  {tensors}, {size}" + (f": {said}" if said else ""))
    lines.append(f"  {count(fields['object_count'], 'other leaf', 'other leaves')}")
    if fields["balance"] is not None:
        balance = fields["balance"]
        least, most = format_bytes(balance["min"]), format_bytes(balance["max"])
        said = f"{least} each" if least == most else f"{least} to {most}"
        lines.append(
            f"  {count(balance['count'], balance['of'])} with {said}; "
            f"the largest is {balance['ratio']:.2f} times the mean"
        )
    files = fields["files"]
    rows = [
        (printable(each["name"]), each["role"], format_bytes(each["bytes"]))
        for each in files[:_FILES_SHOWN]
    ]
    lines.append(f"  {count(len(files), 'file')}:")
    lines += [f"    {line}" for line in columns(rows, right={2})]
    if len(files) > _FILES_SHOWN:
        lines.append(dim(f"    and {len(files) - _FILES_SHOWN:,} more; --json lists all"))
    lines += [f"  note: it {printable(note)}" for note in fields["notes"]]
    for name, reason in list(fields["unread"].items())[:_FILES_SHOWN]:
        lines.append(f"  cannot be read: {printable(name)}, which {printable(reason)}")
    if tree:
        lines += [f"  {line}" for line in tree_lines(leaves, depth)]
    if "tensors" in fields:
        boxes = {each["name"]: len(each["placements"]) for each in fields["tensors"]}
        held = {each["name"]: each["file"] for each in fields["objects"]}
        lines.append("  leaves:")
        rows_of_leaves = []
        for leaf in leaves:
            name, dtype, shape, size = cells_of(leaf)
            if leaf["dtype"] is None:
                rows_of_leaves.append((name, dtype, f"in {held[leaf['name']]}", shape, ""))
            else:
                number = count(boxes[leaf["name"]], "box", "boxes")
                rows_of_leaves.append((name, dtype, shape, number, size))
        lines += [f"    {line}" for line in columns(rows_of_leaves, right={4}, styles={0: bold})]
    return lines
