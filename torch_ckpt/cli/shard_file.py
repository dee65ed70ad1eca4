"""What one file of a checkpoint holds: the boxes in a shard of ours, of stock or of the Hub."""

from __future__ import annotations

import os
from typing import Any

from torch_ckpt.checkpoint.description import entries_of, topology_of
from torch_ckpt.checkpoint.names import DISTCP
from torch_ckpt.cli.output import count, format_bytes, printable
from torch_ckpt.cli.text import bold, columns, natural
from torch_ckpt.errors import CheckpointError, IncompleteError
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.options import local_path
from torch_ckpt.planning.reserved import STRUCTURE_FQN


def checkpoint_around(path: str) -> tuple[OpenedCheckpoint, str] | None:
    """The checkpoint in the directory of the file `path`, and what the file is called there. None
    where that is no checkpoint with such a file, or the file can be read as one by itself.

    Raises IncompleteError for a .distcp file alone, which does not say what it holds.
    """
    directory, name = os.path.split(local_path(path))
    if not os.path.isfile(path) or not _is_part(path):
        return None
    try:
        opened = OpenedCheckpoint(directory)
        files = opened.files()
    except CheckpointError as error:
        if not name.endswith(DISTCP):
            return None
        raise IncompleteError(
            "is a part of a checkpoint of stock DCP, and what is in it cannot be said without the "
            f"others: {error.message}",
            file=local_path(path),
        ) from None
    return (opened, name) if any(file.name == name for file in files) else None


def _is_part(path: str) -> bool:
    if topology_of(None, [os.path.basename(path)]).ranks:
        return True  # named after a rank
    try:
        OpenedCheckpoint(path)
    except CheckpointError:
        return True
    return False


def file_fields(opened: OpenedCheckpoint, name: str) -> dict[str, Any]:
    """The boxes in the file `name`: of each the tensor, its dtype and shape, where the box begins
    in it, and its shape."""
    listing = opened.listing(whole=True)
    (file,) = (each for each in listing.files if each.name == name)
    tensors, objects = entries_of(listing)
    boxes: list[dict[str, Any]] = []
    for tensor in tensors:
        if tensor.alias_of is not None:
            continue
        for placement in tensor.placements:
            if placement.file == name:
                boxes.append(
                    {
                        "name": tensor.name,
                        "dtype": tensor.dtype,
                        "tensor_shape": list(tensor.shape),
                        "offsets": list(placement.offsets),
                        "shape": list(placement.sizes),
                        "bytes": _share(tensor.bytes, tensor.shape, placement.sizes),
                    }
                )
    boxes.sort(key=lambda box: natural(box["name"]))
    ranks = topology_of(listing.world_size, [name]).ranks
    return {
        "path": os.path.join(opened.path, name),
        "checkpoint": opened.path,
        "format": listing.format,
        "role": file.role,
        "rank": ranks.get(name),
        "bytes": file.bytes,
        "boxes": boxes,
        "objects": [
            leaf.name for leaf in objects if leaf.file == name and leaf.name != STRUCTURE_FQN
        ],
    }


def _share(size: int, whole: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Bytes of a box of `part` in a tensor of `whole`, which has `size`."""
    number = divisor = 1
    for all_of_it, some in zip(whole, part, strict=True):
        number, divisor = number * some, divisor * all_of_it
    return size * number // divisor if divisor else 0


def file_text(fields: dict[str, Any]) -> str:
    of = f"of {printable(fields['checkpoint'])}"
    rank = "" if fields["rank"] is None else f", rank {fields['rank']}"
    size = format_bytes(fields["bytes"])
    lines = [f"{bold(printable(fields['path']))}: {fields['role']}, {size}{rank}"]
    lines.append(f"  a file {of}, {fields['format']}")
    boxes = fields["boxes"]
    if boxes:
        lines.append(f"  {count(len(boxes), 'box', 'boxes')}:")
    rows = []
    for box in boxes:
        whole = box["shape"] == box["tensor_shape"]
        where = "whole" if whole else f"from {box['offsets']} of {box['tensor_shape']}"
        row = (printable(box["name"]), box["dtype"], str(box["shape"]), where)
        rows.append((*row, format_bytes(box["bytes"])))
    lines += [f"    {line}" for line in columns(rows, right={4}, styles={0: bold})]
    if fields["objects"]:
        lines.append(f"  {count(len(fields['objects']), 'other leaf', 'other leaves')}:")
        lines += [f"    {printable(name)}" for name in sorted(fields["objects"], key=natural)]
    return "\n".join(lines)
