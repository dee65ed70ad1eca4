"""python warm.py: runs scripts in children of one process, so that torch is imported once.

This process never uses the core, which it loads: in children of a process that has used it, it
refuses to work. Requests and answers are JSON, one per line:

    {"argv": [script, ...], "environment": {...}, "output": path, "errors": path or null,
     "folder": path or null}  ->  process id of the child
    {"wait": process id, "limit": seconds}  ->  exit status, as subprocess has it, or null: killed

Where "errors" is null, standard error is this process's; where "folder" is, so is the directory.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # what torch.compiler.disable needs: most of an import's time
import torch.distributed.tensor

import torch_ckpt.calls.api
import torch_ckpt.calls.async_save
import torch_ckpt.calls.load
import torch_ckpt.calls.save  # noqa: F401

# All that the children need, but nothing that uses the core.


def run(request: dict[str, Any]) -> None:
    """The script's own process, which ends as the script does."""
    os.environ.update(request["environment"])
    if request["folder"]:
        os.chdir(request["folder"])
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    if request["errors"]:
        os.dup2(os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    faulthandler.enable()  # a script that hangs is aborted, and says where it was
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def wait(pid: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["limit"])
        else:
            answer = os.fork()
            if answer == 0:
                run(request)
                return
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
