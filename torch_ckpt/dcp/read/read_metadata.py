"""DCP's Metadata from what the core says of a directory."""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt.checkpoint.quantization import shapes_of_bytes
from torch_ckpt.dcp.plan.load_planner import StoredMetadata
from torch_ckpt.native import core
from torch_ckpt.native.dtypes import PACKED, TORCH_DTYPES
from torch_ckpt.native.opened import Listing
from torch_ckpt.native.torch_private import HFStorageInfo

logger = logging.getLogger(__name__)


def _torch_sizes(sizes: list[int], packed: int) -> torch.Size:
    """Header sizes as torch counts them: packed elements are one."""
    if packed > 1 and sizes:
        sizes = [*sizes[:-1], sizes[-1] // packed]
    return torch.Size(sizes)


@functools.cache
def _zeros(rank: int) -> torch.Size:
    return torch.Size([0] * rank)


class _Type:
    """A dtype and a shape as torch says them; `properties` is None for a dtype that it lacks."""

    def __init__(self, dtype_name: str, shape: list[int] | None, _: int) -> None:
        self.dtype_name = dtype_name
        self.packed = PACKED.get(dtype_name, 1)
        self.size = _torch_sizes(shape or [], self.packed)
        dtype = TORCH_DTYPES.get(dtype_name)
        self.properties = None if dtype is None else TensorProperties(dtype=dtype)
        # Shared by all tensors of this type, and nowhere changed.
        self.whole = ChunkStorageMetadata(_zeros(len(self.size)), self.size)


def metadata_of(listing: Listing, path: str, load_id: str, *, chunks: bool) -> StoredMetadata:
    """With `chunks` the listing is of the whole, and storage_data says where each chunk is, which
    only stock's own way of reading looks at."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    planner_data: dict[str, Any] = {}
    files = [os.path.join(path, file.name) for file in listing.files]
    types = [_Type(*each) for each in listing.types]
    holders = listing.object_files()
    boxes = listing.boxes() if chunks else {}
    # One parse for all paths: a call for each costs more than all the rest.
    paths = json.loads("[" + ",".join(text or "null" for text in listing.paths) + "]")
    for (name, kind, at), names in zip(listing.entries(), paths, strict=True):
        path_of = (name,) if names is None else tuple(names)
        if kind == core.UNREAD:
            # Whoever asks for it hears why it is not read; torch has no metadata of such tensors.
            planner_data[name] = path_of
            state[name] = BytesStorageMetadata()
            continue
        if kind == core.OBJECT:
            planner_data[name] = path_of
            state[name] = BytesStorageMetadata()
            holder = holders[name]
            if chunks and holder is not None:
                storage[MetadataIndex(name)] = os.path.join(path, holder.name)
            continue
        kept = types[at]
        parts = boxes[name] if chunks else None
        if kept.properties is None:
            logger.warning(
                "%s: tensor '%s' is left out: it has dtype %s, which this torch does not have",
                path,
                name,
                kept.dtype_name,
            )
            continue
        planner_data[name] = path_of
        stored = [kept.whole]
        if parts is not None:
            stored = []
            for part in parts:
                offsets = _torch_sizes(part["offsets"], kept.packed)
                sizes = _torch_sizes(part["sizes"], kept.packed)
                stored.append(ChunkStorageMetadata(offsets, sizes))
                info = HFStorageInfo(files[part["file"]], sizes, kept.properties.dtype)
                storage[MetadataIndex(name, offsets)] = info
        state[name] = TensorStorageMetadata(kept.properties, kept.size, stored)
    return StoredMetadata(
        state_dict_metadata=state,
        planner_data=planner_data,
        storage_data=storage,
        storage_meta=StorageMeta(load_id=load_id),
        numbers=_numbers(listing),
        makes_numbers=not chunks,
        path=path,
    )


def shapes_of_numbers(listing: Listing) -> dict[str, tuple[int, ...]]:
    """`shapes_of_bytes`, which few checkpoints have."""
    if not any(name.endswith("_blocks") for name in listing.names):
        return {}
    return shapes_of_bytes(listing.tensors())


def _numbers(listing: Listing) -> dict[str, TensorStorageMetadata]:
    shapes = shapes_of_numbers(listing)
    properties = TensorProperties(dtype=torch.float32)
    return {
        name: TensorStorageMetadata(
            properties,
            torch.Size(shape),
            [ChunkStorageMetadata(_zeros(len(shape)), torch.Size(shape))],
        )
        for name, shape in shapes.items()
    }
