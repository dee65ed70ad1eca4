"""Runs the cases of a module in ranks/ under torchrun, many in one launch."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch_ckpt

HERE = Path(__file__).parent
# The package under test, be it of a checkout or an installed one.
PACKAGE = Path(torch_ckpt.__file__).parents[1]


def run_ranks(modules: str, world: int, folder: Path, *, timeout: int = 600) -> dict[str, str]:
    """Run every case of the modules, "saving,final", of ranks/ on `world` Gloo processes.

    Returns {"saving-case": "ok" or what went wrong}. `folder` is shared by the cases, and by launches that
    are given the same one. Fails with the output of all ranks if no result came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{modules}-{world}.json"
    path = os.pathsep.join([str(PACKAGE), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(world), "-m", "ranks.run", modules, str(folder), str(results)),
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
        raise RuntimeError(f"{modules} on {world} ranks ended with {done.returncode}:\n{output}")
    outcome: dict[str, str] = json.loads(results.read_text())
    if done.returncode != 0:
        outcome.setdefault("", f"ended with {done.returncode}:\n{output}")
    return outcome


def run_worlds(modules: str, worlds: Sequence[int], folder: Path) -> dict[int, dict[str, str]]:
    """`run_ranks` at each of `worlds`, in this order: what some have saved, others load."""
    return {world: run_ranks(modules, world, folder, timeout=1200) for world in worlds}


def assert_ok(outcome: Mapping[str, str]) -> None:
    """Of `run_ranks`: there are cases, and all are fine."""
    bad = {name: said for name, said in outcome.items() if said != "ok"}
    assert outcome and not bad, "\n".join(f"{name}: {said}" for name, said in bad.items())


class Warm:
    """warm.py, which has imported torch for all that it runs."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(PACKAGE), str(HERE), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        atexit.register(self._process.communicate)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> int:
        """The process id of a run of a script, whose output goes to files."""
        words = [str(HERE / argv[0]), *argv[1:]]
        files = {
            "output": str(output),
            "errors": errors and str(errors),
            "folder": folder and str(folder),
        }
        return int(self._ask({"argv": words, "environment": dict(environment), **files}))

    def wait(self, pid: int, limit: float) -> int | None:
        """The exit status; None for a script that did not end in time, and was killed."""
        status: int | None = self._ask({"wait": pid, "limit": limit})
        return status


@functools.cache
def warm() -> Warm:
    return Warm()


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
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(world)]
        pids = [
            warm().start(
                [script, *arguments],
                {**job, "RANK": str(rank), **(environments or {}).get(rank, {})},
                outputs[rank],
            )
            for rank in range(world)
        ]
        end = time.monotonic() + 120
        statuses = [warm().wait(pid, max(0, end - time.monotonic())) for pid in pids]
        # torch 2.10 tells on standard output whom Gloo is connected to.
        said = [re.sub(r"^\[Gloo\].*\n", "", o.read_text(), flags=re.MULTILINE) for o in outputs]
        ended = [status for status in statuses if status is not None]
        assert len(ended) == world, f"some hang, {statuses}:\n" + "\n".join(said)
        return list(zip(ended, said, strict=True))
