"""The training script that run.py starts under torchrun: one process per rank.

It goes on from the newest step below ``--root`` if there is one, and saves every ``save_every``
steps in the background. Each step holds the model as Hugging Face transformers loads it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoints import files_in
from corpus import digest
from worker import Worker, joined

from torch_ckpt import AsyncSave, Checkpointer


def save_step(worker: Worker, checkpointer: Checkpointer, step: int) -> None:
    """Starts to save the current state and returns as soon as training may go on. An error of a
    save is raised by the next one."""
    worker.report("save started", step=step)

    def report(save: AsyncSave) -> None:
        if save.error is None:
            stats, (_, size) = save.stats, files_in(Path(checkpointer.directory.path(step)))
            waited = (stats.blocked_s or 0.0) - (stats.waited_s or 0.0)
            worker.report("saved", step=step, blocked=waited, seconds=stats.total_s, bytes=size)

    checkpointer.save(step).add_done_callback(report)


def train_step(worker: Worker) -> tuple[float, str]:
    """Trains on the next global batch; returns its mean loss per token and its digest."""
    training = worker.training
    batch = training.batches.next()
    share = batch.shape[0] // worker.world
    mine = batch[worker.rank * share : (worker.rank + 1) * share]
    logits = training.model(input_ids=mine[:, :-1], use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
    loss = total / batch[:, 1:].numel()
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()
    # float64: the reported number adds no rounding of its own.
    whole_loss = loss.detach().double()
    dist.all_reduce(whole_loss)
    return whole_loss.item(), digest(batch)


def run(worker: Worker, checkpointer: Checkpointer | None) -> None:
    settings = worker.settings
    first = 1
    if checkpointer is not None:
        first += checkpointer.load()
    for step in range(first, settings.steps + 1):
        rate = worker.training.scheduler.get_last_lr()[0]
        begin = time.perf_counter()
        loss, data = train_step(worker)
        seconds = time.perf_counter() - begin
        worker.report("step", step=step, loss=loss, rate=rate, data=data, seconds=seconds)
        if checkpointer is not None and step % settings.save_every == 0:
            save_step(worker, checkpointer, step)
    if checkpointer is not None:
        checkpointer.close()
        worker.write_reference()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--root", type=Path, help="where steps are saved; without it none is")
    args = parser.parse_args()
    with joined(args.work, args.events) as worker:
        checkpointer = None
        if args.root is not None:
            checkpointer = worker.training.checkpointer(args.root, extras=worker.tokenizer)
        run(worker, checkpointer)


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
