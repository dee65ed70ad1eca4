"""What both worker scripts share: their arguments, the process group, reports to run.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from corpus import Batches, read_tokens
from settings import Settings
from state import Training, build_model, shard_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast

REFERENCE_FILE = "reference.pt"


class Worker:
    """One rank of a torchrun job, with a training that has not begun."""

    def __init__(self, work: Path, events: Path) -> None:
        self.work = work
        self.settings = Settings.read(work / "settings.json")
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
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
        self.training = Training(model, batches, self.settings)

    def report(self, kind: str, **values: Any) -> None:
        """Appends one line to the event file; only rank 0 does."""
        if self.rank == 0:
            line = json.dumps({"kind": kind, "time": time.time(), **values})
            with self._events.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The whole model on rank 0, gathered by torch; nothing on the others. All call it."""
        everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.training.model, options=everything)

    def write_reference(self) -> None:
        """Writes these by ``torch.save``, so that run.py can compare without any code of ours."""
        whole = self.whole_weights()
        if self.rank == 0:
            torch.save(whole, self.work / REFERENCE_FILE)

    def report_processes(self) -> None:
        """Tells run.py the process ids of all ranks, which it needs to stop or kill them."""
        pids: list[int] = [0] * self.world
        dist.all_gather_object(pids, os.getpid())
        parameters = sum(p.numel() for p in self.training.model.parameters())
        self.report("ready", pids=pids, parameters=parameters)


@contextlib.contextmanager
def joined(work: Path, events: Path) -> Iterator[Worker]:
    """Joins the job that torchrun started; at the end leaves it, and ends the process."""
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
    # Torch 2.13 now and then aborts when Python ends after functional collectives, which gather
    # whole weights: about 1 of 50 processes did.
    sys.stdout.flush()
    os._exit(0)
