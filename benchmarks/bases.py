"""Base models of one shape, in bfloat16 or as codes and scales, and the loads of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks import rivals

DTYPE = torch.bfloat16
ROWS, COLUMNS = 2816, 2880
LAYERS = 40
OURS, STOCK = "ours, load_model", "DCP, quantized reader"
READER = "ours, quantized reader"


def layers_of(scale: float) -> int:
    return max(2, round(LAYERS * scale))


def size_of(layers: int) -> int:
    """Bytes of the model."""
    return layers * ROWS * COLUMNS * DTYPE.itemsize


def model_of(layers: int) -> nn.Module:
    """Linear layers under the names of the base."""
    model = nn.Module()
    for number in range(layers):
        model.add_module(f"l{number}", nn.Linear(COLUMNS, ROWS, bias=False, dtype=DTYPE))
    return model


def make(path: Path, kind: str, layers: int) -> None:
    """The base on disk, with an index, which stock's reader needs."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(layers):
        name = f"l{number}.weight"
        if kind == "fp4":
            shape = (ROWS, COLUMNS // 32)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
            )
            tensors[f"{name}_scales"] = torch.randint(
                118, 128, shape, dtype=torch.uint8, generator=generator
            )
            continue
        values = torch.randn(ROWS, COLUMNS, generator=generator)
        if kind == "bf16":
            tensors[name] = values.to(DTYPE)
            continue
        tensors[name] = values.to(torch.float8_e4m3fn)
        grid = (-(-ROWS // 128), -(-COLUMNS // 128))
        tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def load_with_ours(model: nn.Module, path: Path) -> None:
    rivals.ours("load_model")(model, path)


def load_with_stock(model: nn.Module, path: Path) -> None:
    """With targets in bfloat16, which is its best setting: of float32 it makes two copies."""
    quantized = importlib.import_module("torch.distributed.checkpoint.quantized_hf_storage")
    reader = quantized.QuantizedHuggingFaceStorageReader(str(path), 4, DTYPE)
    importlib.import_module("torch.distributed.checkpoint").load(
        model.state_dict(), storage_reader=reader
    )


def load_with_reader(model: nn.Module, path: Path) -> None:
    reader = rivals.ours("QuantizedHuggingFaceStorageReader")(path, 4, DTYPE)
    importlib.import_module("torch.distributed.checkpoint").load(
        model.state_dict(), storage_reader=reader
    )


LOADS: Mapping[str, Callable[[nn.Module, Path], None]] = {
    OURS: load_with_ours,
    READER: load_with_reader,
    STOCK: load_with_stock,
}
