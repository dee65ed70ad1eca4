"""Loads the last checkpoint again and times saves of it against stock DCP, under torchrun.

Both sides save the same tensors (weights and optimizer moments, sharded by FSDP2), each rank its
own shards, into a fresh directory. The time ends when every file and the directory are synced to
the disk on all ranks. The two sides alternate, and swap who goes first every round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import files_in
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from verify import different_names
from worker import REFERENCE_FILE, Worker, joined

import torch_ckpt

OURS = "torch_ckpt"
STOCK = "stock DCP"


def check_reload(worker: Worker, root: Path) -> None:
    """Loads the newest step into this job's own world size and compares the weights."""
    step = worker.training.checkpointer(root).load()
    full = worker.whole_weights()
    if worker.rank == 0:
        expected = torch.load(worker.work / REFERENCE_FILE, weights_only=True)
        different = different_names(full, expected)
        worker.report("reloaded", step=step, different=different, tensors=len(full))


def tensors_of(worker: Worker) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer moments as one flat dict; stock DCP's writer takes no other."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(
        worker.training.model, worker.training.optimizer, options=options
    )
    both: dict[str, Any] = model | optimizer
    return {name: value for name, value in both.items() if isinstance(value, torch.Tensor)}


def sync(directory: Path) -> None:
    """Forces all files of ``directory`` and their names to the disk."""
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def timed_save(
    worker: Worker, side: str, state: dict[str, torch.Tensor], directory: Path
) -> tuple[float, int]:
    """Saves once with one side; returns seconds until durable on all ranks, and the bytes."""
    dist.barrier()
    begin = time.perf_counter()
    if side == OURS:
        ours = torch_ckpt.HuggingFaceStorageWriter(path=str(directory), save_distributed=True)
        torch_ckpt.save(state, storage_writer=ours)
    else:
        stock = dcp.HuggingFaceStorageWriter(path=str(directory), save_distributed=True)
        dcp.save(state, storage_writer=stock)
    if worker.rank == 0:
        sync(directory)
    dist.barrier()
    seconds = time.perf_counter() - begin
    size = files_in(directory)[1]
    dist.barrier()
    if worker.rank == 0:
        shutil.rmtree(directory)
    return seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    args = parser.parse_args()
    with joined(args.work, args.events) as worker:
        check_reload(worker, args.root)
        state = tensors_of(worker)
        for number in range(worker.settings.speed_rounds + 1):
            order = (OURS, STOCK) if number % 2 else (STOCK, OURS)
            for side in order:
                directory = args.work / f"speed-{number}-{side.split()[0]}"
                seconds, size = timed_save(worker, side, state, directory)
                # Round 0 touches memory and code for the first time and is not reported.
                if number > 0:
                    text = f"{side} {size / seconds / 1e9:.2f} GB/s"
                    worker.report(
                        "round", round=number, side=side, seconds=seconds, bytes=size, text=text
                    )


if __name__ == "__main__":
    main()
