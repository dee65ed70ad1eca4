"""What a checkpoint holds, as data.

Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt.checkpoint.names import rank_of
from torch_ckpt.native import core
from torch_ckpt.native.opened import Format, Listing, Source


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a checkpoint. `role` is "data", "objects", "catalog", "index" or "extra"."""

    name: str
    role: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one box of a tensor is stored: from byte `offset` of `file` on.

    `offsets` and `sizes` say which box of the global tensor, in elements. `strides` are bytes from
    one element to the next in each dimension (of packed dtypes, from one byte to the next); None
    where they are row-major, one after another.
    """

    file: str
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: safetensors dtype name, global shape in elements, bytes of the whole.

    `path` is where it stands in the nested state dict; (name,) where that is not known. `alias_of`
    is the tensor that has the same bytes in the same place, stored once (tied tensors). `unread`
    says why it cannot be read; such a tensor may have a dtype of torch's ("complex128"), has the
    shape () where nothing says it, and neither bytes nor placements here.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    path: tuple[str | int, ...]
    placements: tuple[Placement, ...]
    alias_of: str | None = None
    unread: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored leaf that is no tensor, and the file that holds it."""

    name: str
    file: str
    path: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint holds.

    format: "torch_ckpt" for shards of ours, "hf" for safetensors of others and for whole tensors,
        "dcp" for .distcp files of stock DCP, "megatron" for those of Megatron Core (torch_dist)
        and its zarr, "torch" for files of torch.save.
    source: "manifest" for a directory that torch_ckpt wrote; "dcp" for one of stock DCP
        (.metadata beside .distcp files), "megatron" for one with Megatron's metadata.json;
        "torch" for files of torch.save; "index" (its index.json) or "headers" (all .safetensors
        files) for any other.
    save_id, world_size: of the save; None without a manifest.
    metadata: what `save` was given as such.
    beside: data files that are no part of such a directory's checkpoint, and are not read.
    notes: what is wrong with it and no error, and what lies beside; a load logs it.
    """

    path: str
    format: Format
    source: Source
    save_id: str | None
    world_size: int | None
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    objects: tuple[ObjectInfo, ...]
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks wrote a checkpoint.

    world_size: how many there were; None where nothing says it.
    ranks: the rank that wrote a file, of those that are named after one.
    """

    world_size: int | None
    ranks: Mapping[str, int]


def topology_of(world_size: int | None, files: Iterable[str]) -> Topology:
    """`world_size` is that of a manifest; else the names of `files` say it, where they do."""
    ranks = {name: rank for name in files if (rank := rank_of(name)) is not None}
    if world_size is None and ranks:
        world_size = 1 + max(ranks.values())
    return Topology(world_size, ranks)


def _path(name: str, text: str | None) -> tuple[str | int, ...]:
    return (name,) if text is None else tuple(json.loads(text))


def entry_paths(listing: Listing) -> list[tuple[str | int, ...]]:
    """Where each entry stands in the state dict."""
    return [_path(*each) for each in zip(listing.names, listing.paths, strict=True)]


def entries_of(listing: Listing) -> tuple[tuple[TensorInfo, ...], tuple[ObjectInfo, ...]]:
    """The tensors and the objects of a listing of the whole."""
    files = [file.name for file in listing.files]
    holders, boxes = listing.object_files(), listing.boxes()
    tensors, objects = [], []
    stored: dict[str, tuple[Placement, ...]] = {}
    for (name, kind, at), path in zip(listing.entries(), listing.paths, strict=True):
        if kind == core.UNREAD:
            dtype, shape, size = listing.types[at]
            sizes = tuple(shape or ())
            reason = listing.unread[name]
            tensors.append(
                TensorInfo(name, dtype, sizes, size, _path(name, path), (), unread=reason)
            )
            continue
        if kind == core.OBJECT:
            holder = holders[name]
            assert holder is not None  # of a listing of the whole
            objects.append(ObjectInfo(name, holder.name, _path(name, path)))
            continue
        # An alias shares those of its tensor.
        of = listing.aliases.get(name, name)
        if of not in stored:
            stored[of] = tuple(
                Placement(
                    files[part["file"]],
                    part["offset"],
                    tuple(part["offsets"]),
                    tuple(part["sizes"]),
                    tuple(part["strides"]) if "strides" in part else None,
                )
                for part in boxes[of]
            )
        dtype, shape, size = listing.types[at]
        sizes, alias_of = tuple(shape or ()), listing.aliases.get(name)
        tensors.append(
            TensorInfo(name, dtype, sizes, size, _path(name, path), stored[of], alias_of)
        )
    return tuple(tensors), tuple(objects)
