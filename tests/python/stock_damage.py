"""Damaged checkpoints in stock's layout, what stock makes of them, and the order in which it sees
their files."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sample_states import FAILED, STOCK_213, edit_header, stock_shard
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files as stock_consolidate,
)
from torch.distributed.checkpoint.filesystem import FileSystem

from torch_ckpt import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompleteError,
    consolidate_safetensors_files,
)

FINAL = "model-00001-of-00001.safetensors"
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def stock_fails(call: Any) -> None:
    """Assert that stock raises here; any exception documents the fault."""
    if STOCK_213:
        with pytest.raises(FAILED + (MemoryError,)):
            call()


@contextmanager
def listed(*, reverse: bool = False) -> Iterator[None]:
    """Directories list their names in this order, which in stock decides what wins."""
    found, ls = glob.glob, FileSystem.ls

    def sorted_glob(pattern: str) -> list[str]:
        return sorted(found(pattern), reverse=reverse)

    def sorted_ls(self: FileSystem, path: Any) -> list[str]:
        return sorted(ls(self, path), reverse=reverse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glob, "glob", sorted_glob)
        patch.setattr(FileSystem, "ls", sorted_ls)
        yield


def consolidate(source: Path, output: Path, mapping: dict[str, int] | None = None) -> None:
    consolidate_safetensors_files(source, output, mapping)


def stock_consolidated(source: Path, output: Path, mapping: dict[str, int]) -> Any:
    """What stock makes of it, by name; raises where its output cannot be read."""
    output.mkdir(exist_ok=True)
    stock_consolidate(str(source), str(output), mapping)
    loaded: dict[str, torch.Tensor] = {}
    for file in output.glob("model-*.safetensors"):
        loaded.update(load_file(file))
    return loaded


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return size, json.loads(data[8 : 8 + size])


def delete_shard(rank: int) -> Any:
    return lambda files: files[rank].unlink()


def gap(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(1, 2), [3, 0])})


def overlap(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(3, 2), [1, 0])})


def other_dtype(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(2, 2).half(), [2, 0])})


def truncated(files: list[Path]) -> None:
    data = files[1].read_bytes()
    files[1].write_bytes(data[:-4])


def negative_offset(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(2, 2), [-2, 0])})


def wrapping_offset(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(2, 2), [-3, 0])})


def unknown_dtype(files: list[Path]) -> None:
    edit_header(files[1], lambda header: header["w"].update(dtype="F7"))


def empty_input(files: list[Path]) -> None:
    for file in files:
        file.unlink()


# Damage to four shards of two rows each; the kind of error, and what its text must have.
DAMAGE: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "missing first shard": (delete_shard(0), IncompleteError, "'w'"),
    "missing middle shard": (delete_shard(1), IncompleteError, "'w'"),
    "gap": (gap, IncompleteError, "'w'"),
    "overlap": (overlap, ConflictError, "'w'"),
    "other dtype": (other_dtype, ConflictError, "'w'"),
    "truncated": (truncated, CorruptError, "shard-00002"),
    "negative offset": (negative_offset, CorruptError, "shard-00002"),
    "wrapping offset": (wrapping_offset, CorruptError, "shard-00002"),
    "unknown dtype": (unknown_dtype, CorruptError, "shard-00002"),
    "empty input": (empty_input, IncompleteError, "/in"),
}


def garbage(data: bytes) -> bytes:
    return b"\xff" * 64


BROKEN: dict[str, Any] = {
    "empty file": lambda data: b"",
    "garbage": garbage,
    "cut header": lambda data: data[:20],
    "cut data": lambda data: data[:-4],
    "longer": lambda data: data + b"\0" * 4,
}
