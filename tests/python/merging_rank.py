"""python merging_rank.py IN OUT WHAT: one rank of a consolidation. On rank 1 WHAT happens in the
middle of it: "kill" or "interrupt"; "nothing" otherwise."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist

import torch_ckpt
from torch_ckpt import _core

ENDED = 7  # exit status after an error of ours


def main() -> int:
    source, out, what = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    call = _core.call

    def watched(request: dict[str, Any]) -> Any:
        if request["op"] == "merge_part" and dist.get_rank() == 0:
            print(sum(map(len, request["written"])), "kept", flush=True)
        if request["op"] == "merge_part" and dist.get_rank() == 1:
            if what == "kill":
                time.sleep(1)  # the others write their parts
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
        return call(request)

    _core.call = watched
    try:
        torch_ckpt.consolidate_safetensors_files_on_every_rank(source, out, None)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        return ENDED
    except torch_ckpt.CheckpointError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return ENDED
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a group with a dead rank cannot be destroyed in peace
