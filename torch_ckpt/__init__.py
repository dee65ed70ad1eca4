"""torch_ckpt: torch.distributed.checkpoint on a C++ engine, in ordinary safetensors.

    from torch_ckpt import HuggingFaceStorageWriter, HuggingFaceStorageReader

are drop-ins for the classes of the same name in torch.distributed.checkpoint, PinnedMemoryStager is
one for its DefaultStager; `save`, `async_save` and `load` are its calls with our planners and
clean-up around them. A CheckpointDirectory keeps the checkpoints of a training run, one directory
per step.

Names that need torch are imported on first use, so that the command line starts without it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    ConflictError,
    CorruptError,
    ExhaustedError,
    IncompleteError,
    InternalError,
    InvalidArgumentError,
    MissingKeyError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from torch_ckpt.calls.api import load, save
    from torch_ckpt.calls.async_save import async_save
    from torch_ckpt.calls.futures import AsyncSave
    from torch_ckpt.calls.save import SaveStats
    from torch_ckpt.checkpoint.checkpoint import Checkpoint
    from torch_ckpt.checkpoint.checkpoint import open as open
    from torch_ckpt.conversion.convert import convert
    from torch_ckpt.dcp.plan.load_planner import LoadPlanner
    from torch_ckpt.dcp.plan.save_planner import SavePlanner
    from torch_ckpt.dcp.read.quantized import QuantizedHuggingFaceStorageReader
    from torch_ckpt.dcp.read.reader import CheckpointReader, HuggingFaceStorageReader
    from torch_ckpt.dcp.stager import PinnedMemoryStager
    from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
    from torch_ckpt.export.consolidate import (
        MergeFuture,
        consolidate_safetensors_files_on_every_rank,
    )
    from torch_ckpt.export.merge import consolidate_safetensors_files
    from torch_ckpt.native.core import library_path
    from torch_ckpt.native.operators import plan
    from torch_ckpt.patching.patch import TorchPatch, patch_torch
    from torch_ckpt.planning.local_boxes import LocalBoxes
    from torch_ckpt.planning.per_rank import PerRank
    from torch_ckpt.runs.directory import CheckpointDirectory
    from torch_ckpt.training.checkpointer import Checkpointer
    from torch_ckpt.training.models import load_model, save_model

    __version__: str

_LAZY = {
    "AsyncSave": "torch_ckpt.calls.futures",
    "Checkpoint": "torch_ckpt.checkpoint.checkpoint",
    "CheckpointDirectory": "torch_ckpt.runs.directory",
    "CheckpointReader": "torch_ckpt.dcp.read.reader",
    "Checkpointer": "torch_ckpt.training.checkpointer",
    "HuggingFaceStorageReader": "torch_ckpt.dcp.read.reader",
    "HuggingFaceStorageWriter": "torch_ckpt.dcp.write.writer",
    "LoadPlanner": "torch_ckpt.dcp.plan.load_planner",
    "LocalBoxes": "torch_ckpt.planning.local_boxes",
    "MergeFuture": "torch_ckpt.export.consolidate",
    "PerRank": "torch_ckpt.planning.per_rank",
    "PinnedMemoryStager": "torch_ckpt.dcp.stager",
    "QuantizedHuggingFaceStorageReader": "torch_ckpt.dcp.read.quantized",
    "SavePlanner": "torch_ckpt.dcp.plan.save_planner",
    "SaveStats": "torch_ckpt.calls.save",
    "TorchPatch": "torch_ckpt.patching.patch",
    "async_save": "torch_ckpt.calls.async_save",
    "consolidate_safetensors_files": "torch_ckpt.export.merge",
    "consolidate_safetensors_files_on_every_rank": "torch_ckpt.export.consolidate",
    "convert": "torch_ckpt.conversion.convert",
    "library_path": "torch_ckpt.native.core",
    "load": "torch_ckpt.calls.api",
    "load_model": "torch_ckpt.training.models",
    "open": "torch_ckpt.checkpoint.checkpoint",
    "patch_torch": "torch_ckpt.patching.patch",
    "plan": "torch_ckpt.native.operators",
    "save": "torch_ckpt.calls.api",
    "save_model": "torch_ckpt.training.models",
}

__all__ = [
    "AsyncSave",
    "CancelledError",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointError",
    "CheckpointReader",
    "Checkpointer",
    "ConflictError",
    "CorruptError",
    "ExhaustedError",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "IncompleteError",
    "InternalError",
    "InvalidArgumentError",
    "LoadPlanner",
    "LocalBoxes",
    "MergeFuture",
    "MissingKeyError",
    "PerRank",
    "PinnedMemoryStager",
    "QuantizedHuggingFaceStorageReader",
    "SavePlanner",
    "SaveStats",
    "TorchPatch",
    "UnsupportedError",
    "async_save",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "convert",
    "library_path",
    "load",
    "load_model",
    "patch_torch",
    "plan",
    "save",
    "save_model",
]  # but not `open`, which would hide the built-in one


def _installed_version() -> str:
    # Imported here: it takes longer to find out than the command takes to start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch_ckpt")
    except PackageNotFoundError:  # a checkout on the path that was never installed
        return "0.0.0"


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None and name != "__version__":
        raise AttributeError(f"module 'torch_ckpt' has no attribute '{name}'")
    value = getattr(importlib.import_module(module), name) if module else _installed_version()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "open"})


# Beside torch its operators are there at once. The command line starts without either.
if hasattr(sys.modules.get("torch"), "ops"):
    importlib.import_module("torch_ckpt.native.operators")
