"""python directory_saver.py: saves into a CheckpointDirectory in forked children, to be killed.

Reads lines "ROOT KEEP FIRST COUNT CALL" and answers each with the child's process id and, when the
child has ended, its status. A child saves COUNT states from step FIRST on, and waits for the
deletions after each. Before its CALLth call of Python to the system it kills itself; 0: never.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

import torch_ckpt.dcp.plan.load_planner
import torch_ckpt.dcp.plan.save_planner  # noqa: F401

# Nothing that loads the core, which refuses to work in children of a process that has.
import torch_ckpt.export.consolidate

CALLS = ("mkdir", "open", "rename", "replace", "unlink", "rmdir", "fsync")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 7), float(step)), "text": f"step {step}", "step": step}


def kill_at(call: int) -> None:
    made = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def save(root: str, keep: int, first: int, count: int, call: int) -> None:
    directory = torch_ckpt.CheckpointDirectory(root, keep_last=keep)
    if call:
        kill_at(call)
    for step in range(first, first + count):
        directory.save(state(step), step)
        directory.close()


def main() -> None:
    for line in sys.stdin:
        root, *numbers = line.split()
        child = os.fork()
        if child == 0:
            save(root, *(int(number) for number in numbers))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
