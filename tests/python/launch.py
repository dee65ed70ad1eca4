"""Runs the cases of a module in ranks/ under torchrun, many in one launch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch_ckpt

HERE = Path(__file__).parent
# The package under test, be it of a checkout or an installed one.
PACKAGE = Path(torch_ckpt.__file__).parents[1]


def run_ranks(module: str, world: int, folder: Path, *, timeout: int = 240) -> dict[str, str]:
    """Run every case of `ranks.<module>` on `world` Gloo processes.

    Returns {case: "ok" or what went wrong}. `folder` is shared by the cases, and by launches that
    are given the same one. Fails with the output of all ranks if no result came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{module}-{world}.json"
    path = os.pathsep.join([str(PACKAGE), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(world), "-m", "ranks.run", module, str(folder), str(results)),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=folder,
        check=False,
    )
    output = (done.stdout + done.stderr)[-8000:]
    failed = sorted(folder.glob(f"{results.name}.*"))
    output = "\n".join([*(f"{file.name}\n{file.read_text()}" for file in failed), output])
    if not results.exists():
        raise RuntimeError(f"{module} on {world} ranks ended with {done.returncode}:\n{output}")
    outcome: dict[str, str] = json.loads(results.read_text())
    if done.returncode != 0:
        outcome.setdefault("", f"ended with {done.returncode}:\n{output}")
    return outcome


def run_scripts(
    script: str,
    world: int,
    arguments: Sequence[str],
    environments: Mapping[int, Mapping[str, str]] | None = None,
) -> list[tuple[int, str]]:
    """Exit status and output of every rank of a script beside this file, without torchrun, which
    ends all when one has ended. `environments`: what is special about ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                **(environments or {}).get(rank, {}),
            },
        )
        for rank in range(world)
    ]
    try:
        return [(rank.wait(120), rank.communicate()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
