"""What the tests of the storage classes share: states, stock's file layouts made by hand, and
comparison bit for bit."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt

# The faults of stock that tests document are those of this release. Ours is tested always; that
# stock still fails is proved in ./dev campaign.
FULL = os.environ.get("TORCH_CKPT_FULL", "") not in ("", "0")
STOCK_213 = FULL and torch.__version__.startswith("2.13.")

# A failed dcp.save or dcp.load is a CheckpointException, which is no Exception.
FAILED = (Exception, CheckpointException)

# Every way in which a state is saved in one process.
SAVES_OF_OURS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "sharded": torch_ckpt.save,
    "final": lambda state, path: torch_ckpt.save(state, path, layout="final"),
    "async": lambda state, path: torch_ckpt.async_save(state, path).result(),
    "dcp": lambda state, path: dcp.save(
        state,
        storage_writer=torch_ckpt.HuggingFaceStorageWriter(path, layout="sharded"),
        planner=torch_ckpt.SavePlanner(),
        no_dist=True,
    ),
}

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype whose bytes differ from element to element."""
    count = 1
    for size in shape:
        count *= size
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    if dtype == torch.complex64:
        return torch.complex(torch.randn(shape), torch.randn(shape))
    if (
        dtype.itemsize == 1
    ):  # all bit patterns of the float8 types but the NaNs, which are != itself
        return (torch.arange(count) % 120 + 1).to(torch.uint8).view(dtype).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 1 << 15, shape).to(dtype)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that two equal tensors must share: dtype, shape and every byte."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = data.reshape(-1).view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8)
    return data.dtype, tuple(data.shape), raw.numpy().tobytes()


def assert_same(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert bits(got[name]) == bits(value), name
        elif isinstance(value, Mapping):
            assert_same(got[name], value)
        elif isinstance(value, list):
            assert len(got[name]) == len(value), name
            assert_same(dict(enumerate(got[name])), dict(enumerate(value)))
        else:
            assert type(got[name]) is type(value) and got[name] == value, name


def blank(value: Any) -> Any:
    """The same nesting with other content: what a load has to replace."""
    if isinstance(value, torch.Tensor):
        target = torch.empty(value.shape, dtype=value.dtype)
        if target.numel():
            target.view(-1).view(torch.uint8).fill_(0x55 if value.dtype != torch.bool else 0)
        return target
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    return None


def save(state: dict[str, Any], writer: Any, **options: Any) -> None:
    dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], reader: Any, *, no_dist: bool = True, **options: Any) -> None:
    """dcp.load. Where a torch says only that there is no metadata, the error ends with what our
    reader has logged, so that tests can look for the reason in either."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_ckpt.dcp.read.reader")
    logger.addHandler(handler)
    try:
        dcp.load(state, storage_reader=reader, no_dist=no_dist, **options)
    except CheckpointException as error:
        if not str(error).rstrip().endswith("metadata is None"):
            raise
        raise RuntimeError(f"{error}{logged}") from error
    finally:
        logger.removeHandler(handler)


def load_ours(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`state`'s names, loaded through our reader into new memory."""
    target: dict[str, Any] = blank(state)
    load(target, torch_ckpt.HuggingFaceStorageReader(path), **options)
    return target


def load_stock(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    target: dict[str, Any] = blank(state)
    load(target, dcp.HuggingFaceStorageReader(str(path)), **options)
    return target


def stock_shard(
    folder: Path, rank: int, boxes: Mapping[str, tuple[torch.Tensor, list[int]]]
) -> Path:
    """One shard file as stock's writer leaves it: {name: (data, its offsets)}."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
    info = {name: {"saved_offsets": offsets} for name, (_, offsets) in boxes.items()}
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    save_file({name: data for name, (data, _) in boxes.items()}, path, metadata=metadata)
    return path


def stock_rows(folder: Path, tensor: torch.Tensor, ranks: int, name: str = "w") -> list[Path]:
    """`tensor` sharded by rows over `ranks` stock shard files."""
    files, start = [], 0
    for rank, part in enumerate(tensor.chunk(ranks)):
        offsets = [start] + [0] * (tensor.dim() - 1)
        files.append(stock_shard(folder, rank, {name: (part.contiguous(), offsets)}))
        start += len(part)
    return files


def edit_header(path: Path, edit: Any) -> None:
    """Rewrite a safetensors header: `edit(header)` changes it in place."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def listing(folder: Path) -> list[str]:
    """All names below `folder`, hidden ones too."""
    if not folder.exists():
        return []
    return sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*"))
