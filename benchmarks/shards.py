"""Writes sharded checkpoints as stock DCP does, without process groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.states import State


def write_shards(state: Mapping[str, torch.Tensor], directory: Path, world: int, dim: int) -> None:
    """Cuts each tensor along ``dim`` into ``world`` parts, as ``Shard(dim)`` does.

    A tensor with fewer dimensions is cut along its last one. Part i goes to the file of rank i;
    an empty part is left out. ``directory`` is made.
    """
    directory.mkdir()
    for rank in range(world):
        parts: State = {}
        sharding: dict[str, dict[str, list[int]]] = {}
        for name, tensor in state.items():
            axis = min(dim, tensor.dim() - 1)
            length = -(-tensor.shape[axis] // world)
            start = min(rank * length, tensor.shape[axis])
            part = tensor.narrow(axis, start, min(length, tensor.shape[axis] - start))
            if part.numel() == 0:
                continue
            parts[name] = part.clone(memory_format=torch.contiguous_format)
            offsets = [0] * tensor.dim()
            offsets[axis] = start
            sharding[name] = {"saved_offsets": offsets}
        save_file(
            parts,
            directory / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
            metadata={
                "DCP_SHARDING_INFO": json.dumps(sharding),
                "DCP_VERSION": "1.0",
                "format": "pt",
            },
        )
