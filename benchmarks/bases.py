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


# --- experts ----------------------------------------------------------------

EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS, EXPERT_LAYERS = 128, 96, 512, 48
GROUPS = [
    ("l.{i}.e.{e}.gate", "l.{i}.gate_up[{e}, 0/2]"),
    ("l.{i}.e.{e}.up", "l.{i}.gate_up[{e}, 1/2]"),
    ("l.{i}.e.{e}.down", "l.{i}.down[{e}]"),
]
TURNED = [
    ("l.{i}.e.{e}.gate", "l.{i}.gate_up[{e}, :, 0/2].T"),
    ("l.{i}.e.{e}.up", "l.{i}.gate_up[{e}, :, 1/2].T"),
    ("l.{i}.e.{e}.down", "l.{i}.down[{e}].T"),
]


def _layers(make: Callable[[nn.Module], None], layers: int) -> nn.Module:
    model = nn.Module()
    model.l = nn.ModuleList()
    for _ in range(layers):
        layer = nn.Module()
        make(layer)
        model.l.append(layer)
    return model


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(DTYPE), requires_grad=False)


def one_by_one(layers: int) -> nn.Module:
    """A model that has experts as the Hub has them."""

    def make(layer: nn.Module) -> None:
        layer.e = nn.ModuleList()
        for _ in range(EXPERTS):
            expert = nn.Module()
            expert.gate = _parameter(EXPERT_ROWS, EXPERT_COLUMNS)
            expert.up = _parameter(EXPERT_ROWS, EXPERT_COLUMNS)
            expert.down = _parameter(EXPERT_COLUMNS, EXPERT_ROWS)
            layer.e.append(expert)

    return _layers(make, layers)


def in_groups(layers: int, *, turned: bool, small: bool = False) -> nn.Module:
    """One that has them in groups, of [out, in] or, turned, of [in, out]."""
    rows, columns = (2, 4) if small else (EXPERT_ROWS, EXPERT_COLUMNS)

    def make(layer: nn.Module) -> None:
        shapes = (2 * rows, columns), (columns, rows)
        for name, shape in zip(("gate_up", "down"), shapes, strict=True):
            in_order = reversed(shape) if turned else shape
            setattr(layer, name, _parameter(EXPERTS, *in_order))

    return _layers(make, layers)


PLAN_LAYERS = 52  # of 384 tensors: 20,000


def plan_of_catalog(model: nn.Module, path: Path) -> None:
    opened = importlib.import_module("torch_ckpt.native.opened").OpenedCheckpoint(str(path))
    natives = {name: list(value.shape) for name, value in model.state_dict().items()}
    opened.mapped(TURNED, natives, {})


def plan_of_memory(model: nn.Module, _: Path) -> None:
    mapped = importlib.import_module("torch_ckpt.planning.mapped_state")
    pairs = importlib.import_module("torch_ckpt.tensor_mapping.mapping").Pairs.of(TURNED)
    state = model.state_dict()
    # As a save plans.
    with importlib.import_module("torch_ckpt.planning.collector").paused_gc():
        mapped.map_state(state, mapped.kinds_of(state), pairs, {})


PLANS: Mapping[str, Callable[[nn.Module, Path], None]] = {
    "catalog of a load": plan_of_catalog,
    "memory of a save": plan_of_memory,
}
