"""torch-ckpt inspect: what is in a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.cli.output import Output, count, format_bytes, printable, with_output
from torch_ckpt.description import Description, TensorInfo

_SOURCES = {
    "manifest": "written by torch_ckpt",
    "index": "read by its index",
    "headers": "read by the headers of its .safetensors files",
    "dcp": "written by stock DCP, read by its .metadata",
    "megatron": "written by Megatron Core, read by its .metadata",
    "torch": "written by torch.save",
}


@click.command()
@click.argument("path", type=click.Path())
@click.option("--tensors", is_flag=True, help="List every tensor and every other leaf.")
@with_output
def inspect(path: str, tensors: bool, output: Output) -> None:
    """Show what the checkpoint PATH holds, a directory or a file.

    Reads headers only; 'verify' reads the data, 'ls' lists names, 'show' shows values.
    """
    described = Checkpoint(path).describe()
    output.report(_fields(described, tensors), lambda: _text(described, tensors))


def _stored_bytes(described: Description) -> int:
    return sum(tensor.bytes for tensor in described.tensors if tensor.alias_of is None)


def _fields(described: Description, tensors: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "path": described.path,
        "format": described.format,
        "source": described.source,
        "save_id": described.save_id,
        "world_size": described.world_size,
        "files": [dataclasses.asdict(file) for file in described.files],
        "beside": list(described.beside),
        "tensor_count": len(described.tensors),
        "tensor_bytes": _stored_bytes(described),
        "object_count": len(described.objects),
    }
    if tensors:
        fields["tensors"] = [dataclasses.asdict(tensor) for tensor in described.tensors]
        fields["objects"] = [dataclasses.asdict(leaf) for leaf in described.objects]
    return fields


def _text(described: Description, tensors: bool) -> str:
    size = format_bytes(_stored_bytes(described))
    lines = [f"{described.path}: {described.format}, {_SOURCES[described.source]}"]
    if described.save_id is not None:
        saved_by = count(described.world_size or 1, "rank")
        lines.append(f"  save {described.save_id}, by {saved_by}")
    dtypes = ", ".join(sorted({tensor.dtype for tensor in described.tensors}))
    lines.append(
        f"  {count(len(described.tensors), 'tensor')}, {size}" + (f" ({dtypes})" if dtypes else "")
    )
    lines.append(f"  {count(len(described.objects), 'other leaf', 'other leaves')}")
    lines.append(f"  {count(len(described.files), 'file')}:")
    width = max((len(file.name) for file in described.files), default=0)
    lines += [
        f"    {file.name:{width}}  {file.role:8} {format_bytes(file.bytes):>10}"
        for file in described.files
    ]
    if described.beside:
        lines.append(f"  not read: {', '.join(map(printable, described.beside))}")
    if tensors:
        lines.append("  tensors:")
        lines += [f"    {_tensor_line(tensor)}" for tensor in described.tensors]
        lines.append("  other leaves:")
        lines += [f"    {printable(leaf.name)}  in {leaf.file}" for leaf in described.objects]
    return "\n".join(lines)


def _tensor_line(tensor: TensorInfo) -> str:
    size = format_bytes(tensor.bytes)
    boxes = count(len(tensor.placements), "box", "boxes")
    where = f"{size}, {boxes}" if tensor.alias_of is None else f"is {printable(tensor.alias_of)}"
    return f"{printable(tensor.name)}  {tensor.dtype}{list(tensor.shape)}  {where}"
