"""Forks one child per action of fault_actions.py, so that torch is imported once.

This process never uses the core, which it loads: in children of a process that has used it, it
refuses to work. Requests and answers are JSON, one per line:

    {"do": "start", "action": name, "args": {...}, "faults": str} -> {"id": int}
    {"do": "wait", "id": int}  ->  {"signal": int, "ok": value} or {"signal": int, "error": {...}}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import warnings
from typing import Any

import fault_actions
import torch
import torch._dynamo  # what torch.compiler.disable needs: most of an import's time

import torch_ckpt.calls.api
import torch_ckpt.calls.async_save
import torch_ckpt.calls.load
import torch_ckpt.calls.save  # noqa: F401

# All that the children need, but nothing that uses the core.

LIMIT_SECONDS = 120


def describe(error: BaseException) -> dict[str, Any]:
    return {
        "types": [kind.__name__ for kind in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "file": getattr(error, "filename", None) or getattr(error, "file", None),
        "text": str(error),
    }


def child(request: dict[str, Any], out: int) -> None:
    os.dup2(2, 1)
    if request["faults"]:
        os.environ["TORCH_CKPT_FAULTS"] = request["faults"]
    warnings.simplefilter("ignore")
    try:
        answer = {"ok": getattr(fault_actions, request["action"])(**request["args"])}
    except BaseException as error:
        answer = {"error": describe(error)}
    os.write(out, json.dumps(answer).encode())
    os._exit(0)


def start(request: dict[str, Any]) -> tuple[int, int]:
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(into)
        child(request, out)
    os.close(out)
    return pid, into


def wait(pid: int, into: int) -> dict[str, Any]:
    text = b""
    while True:
        ready, _, _ = select.select([into], [], [], LIMIT_SECONDS)
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            text = json.dumps({"error": {"types": ["Timeout"], "text": "hangs"}}).encode()
            break
        part = os.read(into, 1 << 16)
        if not part:
            break
        text += part
    os.close(into)
    _, status = os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(text) if text else {}
    return {**answer, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}


def main() -> None:
    torch.set_num_threads(1)
    children: dict[int, tuple[int, int]] = {}
    count = 0
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            count += 1
            children[count] = start(request)
            answer: dict[str, Any] = {"id": count}
        else:
            answer = wait(*children.pop(request["id"]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
