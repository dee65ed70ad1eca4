"""python checkpointer_run.py ROOT STEPS LOG: a run that goes on where it was killed. Each step's loss
is a line of LOG."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from training_loop import losses_of, run_of

import torch_ckpt


def main() -> None:
    root, steps, log = sys.argv[1:]
    torch.set_num_threads(1)
    run = run_of(lambda parameters: torch.optim.AdamW(parameters, 0.01))
    with (
        torch_ckpt.Checkpointer(root, **run, keep_last=2, keep_every=10, best="loss") as saver,
        Path(log).open("a") as lines,
    ):
        for step in range(saver.load() + 1, int(steps) + 1):
            (loss,) = losses_of(run, step, step)
            lines.write(f"{step} {loss!r}\n")
            lines.flush()
            if step % 3 == 0:
                saver.save(step, metrics={"loss": loss})


if __name__ == "__main__":
    main()
