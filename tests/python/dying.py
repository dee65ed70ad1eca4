"""A rank that dies, or is stopped, when it comes to a function; the others say what they hear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import torch_ckpt.ranks.ranks
import torch_ckpt.ranks.transfers

TIMEOUT_S = 4.0


def wait_less() -> None:
    """Of ranks that are only stopped. From the next call on."""
    torch_ckpt.ranks.ranks._known.clear()  # connections that wait for ten minutes
    torch_ckpt.ranks.ranks.TIMEOUT_S = torch_ckpt.ranks.transfers.TIMEOUT_S = TIMEOUT_S
    torch_ckpt.ranks.ranks.timeout_of = lambda _: 0.0


def arm(owner: Any, name: str, how: str) -> None:
    """The function `name` of `owner` ends this rank, "kill", or stops it for longer than others
    wait, "stop"."""

    def fatal(*_: Any, **__: Any) -> Any:
        if how == "stop":  # and ended when the others have long given up
            end = f"import os, time; time.sleep({5 * TIMEOUT_S}); os.kill({os.getpid()}, 9)"
            subprocess.Popen([sys.executable, "-S", "-c", end])
            signal.raise_signal(signal.SIGSTOP)  # this thread, now
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, fatal)


def run(job: Callable[[], Any], folder: Path, victim: int) -> None:
    """Writes what `job` raises, and how long it took, to folder/<rank>.json, and ends the
    process when all but the victim have."""
    began = time.monotonic()
    try:
        job()
        said = ""
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    report = {"said": said, "seconds": time.monotonic() - began}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(report))
    others = [rank for rank in range(dist.get_world_size()) if rank != victim]
    until = time.monotonic() + 60
    # Rank 0 has the store, which the others ask who is gone.
    while not all(Path(folder, f"{rank}.json").exists() for rank in others):
        assert time.monotonic() < until, "the others have not heard of it"
        time.sleep(0.01)
    os._exit(0)
