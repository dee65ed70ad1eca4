"""Writing the finished model as a directory that transformers loads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from worker import Worker

import torch_ckpt

REFERENCE_FILE = "reference.pt"


def two_files(state_dict: dict[str, Any]) -> dict[str, int]:
    """Divides the names over two files of about equal bytes (name -> file number from 1)."""
    sizes = {name: value.numel() * value.element_size() for name, value in state_dict.items()}
    half = sum(sizes.values()) / 2
    mapping: dict[str, int] = {}
    before = 0
    for name, size in sizes.items():
        mapping[name] = 1 if before < half else 2
        before += size
    return mapping


def export_model(worker: Worker, export: Path) -> None:
    """Writes the sharded model as whole safetensors files, with its config and tokenizer.

    The full weights go to ``reference.pt`` too, gathered by torch and written by ``torch.save``,
    so that run.py can compare without trusting any of our code.
    """
    model = worker.state.model
    shards = get_model_state_dict(model)
    writer = torch_ckpt.HuggingFaceStorageWriter(
        path=str(export),
        fqn_to_index_mapping=two_files(shards),
        save_distributed=True,
        enable_consolidation=True,
    )
    dist.barrier()
    begin = time.perf_counter()
    torch_ckpt.save(shards, storage_writer=writer, process_group=worker.saves)
    dist.barrier()
    worker.report("exported", seconds=time.perf_counter() - begin)

    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=everything)
    if worker.rank == 0:
        model.config.save_pretrained(export)
        worker.tokenizer.save_pretrained(export)
        torch.save(full, worker.work / REFERENCE_FILE)
