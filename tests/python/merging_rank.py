"""python merging_rank.py IN OUT WHAT: one rank of a consolidation. In the middle of it WHAT happens
on rank 1: "kill", "stop" (until the others have ended), "interrupt", or "interrupt at the end",
while rank 0 commits; "kill early" while rank 0 begins. "kill the first" happens on rank 0;
"nothing" otherwise."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import torch_ckpt
from torch_ckpt.native import core

ENDED = 7  # exit status after an error of ours
TIMEOUT = 10.0  # of ranks that do not answer, where one is stopped


def wait_for_the_others(out: str, gone: int) -> None:
    """That processes end is not how the others are to hear of a rank that is gone."""
    ended = [Path(f"{out}.{rank}") for rank in range(dist.get_world_size())]
    ended[dist.get_rank()].touch()
    while not all(path.exists() for rank, path in enumerate(ended) if rank != gone):
        time.sleep(0.05)


def main() -> int:
    source, out, what = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    call = core.call

    def watched(request: dict[str, Any]) -> Any:
        if request["op"] == "merge_share" and dist.get_rank() == 1:
            if what == "kill":
                time.sleep(1)  # the others write their parts
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                signal.raise_signal(signal.SIGSTOP)  # this thread, now
            if what == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if what == "kill the first":
                time.sleep(1)
                os.kill(pids[0], signal.SIGKILL)
        if request["op"] == "merge_begin" and what == "kill early":
            os.kill(pids[1], signal.SIGKILL)
            time.sleep(4)  # longer than those who miss it wait for each other
        if request["op"] == "merge_commit" and what == "interrupt at the end":
            time.sleep(1)  # the others wait for the end
            os.kill(pids[1], signal.SIGINT)
            time.sleep(1)
        return call(request)

    core.call = watched
    try:
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            source, out, None, timeout=TIMEOUT if what == "stop" else 600
        )
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        return ENDED
    except torch_ckpt.CheckpointError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        if what.startswith("kill") or (what == "stop" and dist.get_rank() != 1):
            wait_for_the_others(out, 0 if what == "kill the first" else 1)
        if what == "stop":
            os.kill(pids[1], signal.SIGCONT)
        return ENDED
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a group with a dead rank cannot be destroyed in peace
