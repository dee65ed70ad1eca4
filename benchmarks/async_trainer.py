"""A training process that saves in the background, for one contender of an async row.

``python -m benchmarks.async_trainer`` is started anew for each run, because a stager keeps memory
of the size of the state for as long as it lives, and so does a process that saves. It makes the
state, saves it several times with the same stager, and prints one line of JSON with the figures of
the first save and of the last one, whose files it leaves for the check; or with what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from benchmarks import async_contenders, files, processes, rivals, states
from benchmarks.async_contenders import Save
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.trainer import Pace, Trainer

SHAPES: Mapping[str, Callable[[float], states.Shapes]] = {
    "llama": states.llama_1b,
    # A quarter: rivals take seconds for a thousand tensors.
    "experts": lambda scale: states.mixture_of_experts(scale / 4),
    "lora": states.lora_1b,
}
DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class SaveFigures:
    """What one save took, in seconds unless said otherwise."""

    call: float
    """Until the call came back."""
    blocking: float
    """Until the tensors may change: with the wait for staging, if that goes on after the call."""
    durable: float
    """Until the bytes were on the disk."""
    lost: float
    """What the steps meanwhile took longer than undisturbed ones."""
    worst_step: float
    """The longest of these steps, in undisturbed steps."""
    cpu: float
    """Of this process and its children, less that of as many undisturbed steps."""


def time_save(
    save: Save,
    state: states.State,
    path: Path,
    trainer: Trainer,
    pace: Pace,
    sync: Callable[[Path], None],
    cpu_seconds: Callable[[], float],
) -> SaveFigures:
    """Saves to ``path`` once, and trains until the bytes are durable.

    ``sync`` is called when the save says that it is done, and counts.
    """
    cpu = cpu_seconds()
    start = time.perf_counter()
    answer = save(state, path)
    call = time.perf_counter() - start
    if isinstance(answer, AsyncSaveResponse):
        answer.staging_completion.result()
        upload: Future[Any] = answer.upload_completion
    else:
        upload = answer
    blocking = time.perf_counter() - start

    def finish() -> float:
        upload.result()
        sync(path)
        return time.perf_counter() - start

    # In a thread, or the end would be seen only between two steps.
    with ThreadPoolExecutor(1) as waiter:
        end = waiter.submit(finish)
        steps = [trainer.step()]
        while not end.done():
            steps.append(trainer.step())
        durable = end.result()
    return SaveFigures(
        call=call,
        blocking=blocking,
        durable=durable,
        lost=sum(steps) - len(steps) * pace.seconds,
        worst_step=max(steps) / pace.seconds,
        cpu=cpu_seconds() - cpu - len(steps) * pace.cpu_seconds,
    )


def train(
    contender: str, state: states.State, path: Path, program: LimitsProgram, saves: int
) -> Any:
    """All saves of one contender; returns what is printed."""
    chosen = async_contenders.contenders(sum(tensor.nbytes for tensor in state.values()))[contender]
    # Ours is durable when it says that it is done; rivals get what they lack.
    sync = files.make_durable if chosen.role == "rival" else lambda path: None
    trainer = Trainer()
    # Before anything is made: what a contender starts then counts in its first save.
    pace = trainer.undisturbed()
    figures: list[SaveFigures] = []
    with contextlib.ExitStack() as closing:
        watcher = closing.enter_context(MemoryWatcher(program, tree=True))
        before = watcher.begin()

        def cpu_seconds() -> float:
            return processes.cpu_seconds(without=watcher.pid)

        save = chosen.make(closing)
        for number in range(saves):
            if number > 0:
                files.remove(path)
                pace = trainer.undisturbed()
            figures.append(time_save(save, state, path, trainer, pace, sync, cpu_seconds))
        extra = watcher.end() - before
    return {
        "first": dataclasses.asdict(figures[0]),
        "last": dataclasses.asdict(figures[-1]),
        "extra_memory": extra,
    }


def allow_files(tensors: int) -> None:
    """Lets that many tensors cross to another process.

    Stock shares each by file descriptors, two at times, which fails where they are too few. Names
    of files in shared memory are what torch has for that case.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < 3 * tensors:
        torch.multiprocessing.set_sharing_strategy("file_system")


def main(arguments: list[str]) -> int:
    """Trains and saves as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_trainer")
    parser.add_argument("contender", choices=async_contenders.contenders(1))
    parser.add_argument("--state", choices=SHAPES, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # or the daemon of PROCESS looks up this host's name
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    state = states.random_state(SHAPES[options.state](options.scale), DTYPE)
    allow_files(len(state))
    try:
        program = LimitsProgram(options.program)
        answer = train(options.contender, state, options.path, program, options.saves)
    except Exception as error:  # on stdout, because the daemon of PROCESS writes to stderr as well
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
