"""DCP's Metadata from what the core says of a directory."""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import Any

import torch
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt import _core
from torch_ckpt.dtypes import PACKED, TORCH_DTYPES

logger = logging.getLogger(__name__)


def _torch_sizes(sizes: list[int], packed: int) -> torch.Size:
    """Header sizes as torch counts them: packed elements are one."""
    if packed > 1 and sizes:
        sizes = [*sizes[:-1], sizes[-1] // packed]
    return torch.Size(sizes)


@functools.cache
def _zeros(rank: int) -> torch.Size:
    return torch.Size([0] * rank)


def metadata_of(described: dict[str, Any], path: str, load_id: str, *, chunks: bool) -> Metadata:
    """`described` is the answer of the core's "describe"; with `chunks` it has placements, and
    storage_data says where each chunk is, which only stock's own way of reading looks at."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    planner_data: dict[str, Any] = {}
    properties: dict[torch.dtype, TensorProperties] = {}
    files = [os.path.join(path, file["name"]) for file in described["files"]] if chunks else []
    # One parse for all paths: a call for each costs more than all the rest.
    paths = json.loads("[" + ",".join(text or "null" for text in described["paths"]) + "]")
    columns = zip(
        described["names"],
        described["kinds"],
        described["dtypes"],
        described["shapes"],
        paths,
        described["placements"],
        strict=True,
    )
    for name, kind, dtype_name, shape, names, placements in columns:
        path_of = (name,) if names is None else tuple(names)
        if kind == _core.OBJECT:
            planner_data[name] = path_of
            state[name] = BytesStorageMetadata()
            if chunks:
                storage[MetadataIndex(name)] = files[placements[0]["file"]]
            continue
        dtype = TORCH_DTYPES.get(dtype_name)
        if dtype is None:
            logger.warning(
                "%s: tensor '%s' is left out: it has dtype %s, which this torch does not have",
                path,
                name,
                dtype_name,
            )
            continue
        planner_data[name] = path_of
        packed = PACKED.get(dtype_name, 1)
        size = _torch_sizes(shape, packed)
        if dtype not in properties:
            properties[dtype] = TensorProperties(dtype=dtype)
        stored = [ChunkStorageMetadata(_zeros(len(size)), size)]
        if chunks:
            stored = []
            for part in placements:
                offsets = _torch_sizes(part["offsets"], packed)
                sizes = _torch_sizes(part["sizes"], packed)
                stored.append(ChunkStorageMetadata(offsets, sizes))
                file = files[part["file"]]
                storage[MetadataIndex(name, offsets)] = _HFStorageInfo(file, sizes, dtype)
        state[name] = TensorStorageMetadata(properties=properties[dtype], size=size, chunks=stored)
    metadata = Metadata(state_dict_metadata=state, planner_data=planner_data, storage_data=storage)
    metadata.storage_meta = StorageMeta(load_id=load_id)
    return metadata
