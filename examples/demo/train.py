"""The training script that run.py starts under torchrun: one process per rank.

It goes on from the newest whole checkpoint below ``--root`` if there is one, saves asynchronously
every ``save_every`` steps, and at the end writes the finished model for Hugging Face transformers.
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
from export import export_model
from torch.distributed.checkpoint.staging import StagingOptions
from worker import Worker, joined

from torch_ckpt import AsyncSave, CheckpointDirectory, PinnedMemoryStager


class Saver:
    """Asynchronous saves into the directory; an error of a save is raised by the next call."""

    def __init__(self, worker: Worker, directory: CheckpointDirectory) -> None:
        self._worker = worker
        self._directory = directory
        # Copies into memory that is kept from save to save, and blocks for no longer.
        self._stager = PinnedMemoryStager(StagingOptions(use_async_staging=False))

    def start(self) -> None:
        """Starts to save the current state and returns as soon as training may go on."""
        step = self._worker.state.step
        self._worker.report("save started", step=step)
        save = self._directory.async_save(
            {"app": self._worker.state}, step, async_stager=self._stager
        )
        save.add_done_callback(lambda save: self._report(step, save))

    def _report(self, step: int, save: AsyncSave) -> None:
        if save.error is None:
            stats, (_, size) = save.stats, files_in(Path(self._directory.path(step)))
            waited = (stats.blocked_s or 0.0) - (stats.waited_s or 0.0)
            self._worker.report(
                "saved", step=step, blocked=waited, seconds=stats.total_s, bytes=size
            )

    def wait(self) -> None:
        """Waits until the last save is on disk; raises its error if it failed."""
        self._directory.close()


def train_step(worker: Worker) -> tuple[float, str]:
    """Trains on the next global batch; returns its mean loss per token and its digest."""
    state = worker.state
    batch = state.batches.next()
    share = batch.shape[0] // worker.world
    mine = batch[worker.rank * share : (worker.rank + 1) * share]
    logits = state.model(input_ids=mine[:, :-1], use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
    loss = total / batch[:, 1:].numel()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    state.step += 1
    # float64: the reported number adds no rounding of its own.
    whole_loss = loss.detach().double()
    dist.all_reduce(whole_loss)
    return whole_loss.item(), digest(batch)


def run(worker: Worker, root: Path, save: bool, export: Path | None) -> None:
    settings, state = worker.settings, worker.state
    directory = CheckpointDirectory(root, keep_last=3, process_group=worker.saves)
    saver = Saver(worker, directory)
    resumed = directory.load({"app": state}, missing_ok=True)
    if resumed is not None:
        name = Path(directory.path(resumed)).name
        worker.report("resumed", step=state.step, checkpoint=name)
    while state.step < settings.steps:
        rate = state.scheduler.get_last_lr()[0]
        begin = time.perf_counter()
        loss, data = train_step(worker)
        seconds = time.perf_counter() - begin
        worker.report("step", step=state.step, loss=loss, rate=rate, data=data, seconds=seconds)
        if save and state.step % settings.save_every == 0:
            saver.start()
    saver.wait()
    if export is not None:
        export_model(worker, export)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--export", type=Path)
    args = parser.parse_args()
    with joined(args.work, args.events) as worker:
        run(worker, args.root, not args.no_save, args.export)


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
