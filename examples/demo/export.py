"""Writing the finished model as a directory that transformers loads."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from worker import Worker

import torch_ckpt

REFERENCE_FILE = "reference.pt"


def export_model(worker: Worker, export: Path) -> None:
    """Writes the sharded model as whole safetensors files, with its config and tokenizer: every
    rank its part of them, in one pass.

    The full weights go to ``reference.pt`` too, gathered by torch and written by ``torch.save``,
    so that run.py can compare without trusting any of our code.
    """
    model = worker.state.model
    dist.barrier()
    begin = time.perf_counter()
    torch_ckpt.save(
        get_model_state_dict(model),
        checkpoint_id=export,
        process_group=worker.saves,
        layout="final",
        naming="hf",
        max_shard_size=worker.settings.export_shard_size,
        extras=[model.config, worker.tokenizer],
    )
    dist.barrier()
    worker.report("exported", seconds=time.perf_counter() - begin)

    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=everything)
    if worker.rank == 0:
        torch.save(full, worker.work / REFERENCE_FILE)
