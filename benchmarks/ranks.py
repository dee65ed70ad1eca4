"""Starts a module as several ranks, one process each, and returns what each said last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from benchmarks import environment, files

TIMEOUT_SECONDS = 900


class RankError(RuntimeError):
    """A rank failed."""


def run_ranks(
    module: str, words: list[list[str]], python: str | None = None
) -> list[dict[str, Any] | None]:
    """Runs ``python -m module``, rank i with ``words[i]``; the last line that each says, of JSON.
    ``python`` is the interpreter, this one if None.

    None for a rank that says nothing.

    Raises:
        RankError: one of them failed.
    """
    # As torchrun's agent, which has the port before anybody else can.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = len(words)
    ranks = [
        subprocess.Popen(
            [python or sys.executable, "-m", module, *words[rank]],
            cwd=environment.REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
            },
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode != 0:
            last = errors.strip().splitlines()[-1:]
            raise RankError(": ".join([f"a rank ended with status {rank.returncode}", *last]))
    lines = [out.splitlines()[-1:] for out, _ in said]
    return [json.loads(line[0]) if line else None for line in lines]


def say(answer: dict[str, Any]) -> None:
    """On all ranks, at their end: what rank 0 says for `run_ranks`."""
    if dist.get_rank() == 0:
        sys.stdout.write("\n" + json.dumps(answer) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End a rank. Torch 2.13 now and then aborts where it is torn down after functional
    collectives, which full_tensor uses: 1 of 48 ranks did that called nothing else. Nothing of it
    is measured."""
    sys.stdout.flush()
    os._exit(status)


def sync_everything(path: Path) -> None:
    """What stock's files lack: rank 0 syncs them when all ranks are done."""
    dist.barrier()
    if dist.get_rank() == 0:
        files.make_durable(path)
    dist.barrier()
