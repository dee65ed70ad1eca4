"""What both worker scripts share: their arguments, the process group, reports to run.py."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from corpus import Batches, read_tokens
from settings import Settings
from state import TrainingState, build_model, shard_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast


class Worker:
    """One rank of a torchrun job, with a fresh training state.

    ``saves`` is a process group of its own for checkpoints: an asynchronous save talks to the
    other ranks from a background thread, and must not mix its messages with the training's.
    """

    def __init__(self, work: Path, events: Path) -> None:
        self.work = work
        self.settings = Settings.read(work / "settings.json")
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.saves = dist.new_group(backend="gloo")
        self._events = events
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
        batches = Batches(
            read_tokens(self.tokenizer),
            self.settings.global_batch,
            self.settings.sequence_length,
            self.settings.seed,
        )
        model = build_model(self.settings, self.tokenizer)
        shard_model(model, init_device_mesh("cpu", (self.world,)))
        self.state = TrainingState(model, batches, self.settings)

    def report(self, kind: str, **values: Any) -> None:
        """Appends one line to the event file; only rank 0 does."""
        if self.rank == 0:
            line = json.dumps({"kind": kind, "time": time.time(), **values})
            with self._events.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def report_processes(self) -> None:
        """Tells run.py the process ids of all ranks, which it needs to stop or kill them."""
        pids: list[int] = [0] * self.world
        dist.all_gather_object(pids, os.getpid())
        parameters = sum(p.numel() for p in self.state.model.parameters())
        self.report("ready", pids=pids, parameters=parameters)


@contextlib.contextmanager
def joined(work: Path, events: Path) -> Iterator[Worker]:
    """Joins the job that torchrun started, and leaves it at the end."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    try:
        worker = Worker(work, events)
        worker.report_processes()
        yield worker
        dist.barrier()
    finally:
        dist.destroy_process_group()
