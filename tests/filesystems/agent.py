"""The first process of a node: starts what runs on it, and takes the node with it when it ends.

Requests and answers are JSON, one per line:

    {"do": "sh", "command": str, "limit": s}        -> {"status": int, "output": str}
    {"do": "signal", "name": str, "signal": int}    -> {"pids": [int]}
    {"do": "start", "action": name, "args": {...}, "environment": {...}} -> {"id": int}
    {"do": "run", "command": [str], "environment": {...}}                -> {"id": int}
    {"do": "wait", "id": int, "limit": s}  ->  {"ok": value}, {"error": {...}} and {"signal": int}
    {"do": "kill", "id": int}                       -> {}

An action is a function of actions.py, called in a child that is forked from here, so that torch is
imported once. This process never loads the core, which refuses to work in children of one that has.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

GIVE_UP_SECONDS = 10  # for a killed process to be gone; one that hangs in the kernel never is


class Child(NamedTuple):
    pid: int
    answer: int  # a pipe that ends with the child, -1 for a command
    output: str  # a file, for a command


def describe(error: BaseException) -> dict[str, Any]:
    return {
        "types": [kind.__name__ for kind in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "text": str(error),
    }


def run_action(request: dict[str, Any], out: int) -> None:
    os.setpgid(0, 0)
    os.dup2(2, 1)
    os.environ.update(request["environment"])
    warnings.simplefilter("ignore")
    try:
        import actions

        answer = {"ok": getattr(actions, request["action"])(**request["args"])}
    except BaseException as error:
        answer = {"error": describe(error)}
    os.write(out, json.dumps(answer).encode())
    os._exit(0)


def start(request: dict[str, Any]) -> Child:
    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(into)
        run_action(request, out)
    os.close(out)
    return Child(pid, into, "")


def run(request: dict[str, Any]) -> Child:
    with tempfile.NamedTemporaryFile(delete=False) as output:
        process = subprocess.Popen(
            request["command"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **request["environment"]},
            start_new_session=True,
        )
    process.returncode = 0  # wait() below looks after it, not Popen
    return Child(process.pid, -1, output.name)


def end(child: Child) -> int | None:
    """Kill a child and its group; its wait status, None where it hangs in the kernel."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)
    return reap(child.pid, GIVE_UP_SECONDS)


def reap(pid: int, limit: float) -> int | None:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


def wait(child: Child, limit: float) -> dict[str, Any]:
    text, hangs = b"", False
    if child.answer >= 0:
        until = time.monotonic() + limit
        while select.select([child.answer], [], [], max(0.0, until - time.monotonic()))[0]:
            part = os.read(child.answer, 1 << 16)
            if not part:
                break
            text += part
        else:
            hangs = True
        os.close(child.answer)
        status = end(child) if hangs else reap(child.pid, GIVE_UP_SECONDS)
    else:
        status = reap(child.pid, limit)
        hangs = status is None
        if hangs:
            end(child)
        output = pathlib.Path(child.output)
        said = output.read_text(errors="replace")[-6000:]
        output.unlink()
        text = json.dumps({"ok": {"status": status, "output": said}}).encode()
    if hangs:
        text = json.dumps({"error": {"types": ["Timeout"], "text": f"hangs: {limit} s"}}).encode()
    answer: dict[str, Any] = json.loads(text) if text else {}
    killed = status is not None and os.WIFSIGNALED(status)
    return {**answer, "signal": os.WTERMSIG(status) if killed else 0}


def shell(command: str, limit: float) -> dict[str, Any]:
    """Its output goes through a file: a daemon that it leaves behind would keep a pipe open."""
    child = run({"command": ["sh", "-c", command], "environment": {}})
    answer = wait(child, limit)
    if "error" in answer:
        return {"status": -1, "output": answer["error"]["text"]}
    return answer["ok"]


def send_signal(name: str, number: int) -> list[int]:
    """To the processes of this node (its process namespace) that are called so."""
    pids = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == name:
                os.kill(int(folder.name), number)
                pids.append(int(folder.name))
    return pids


def reap_orphans(children: Iterable[int]) -> None:
    """Daemons that have ended are children of this process, the first of its namespace; whoever
    asks whether they still run would hear so."""
    for pid in pathlib.Path("/proc/self/task/1/children").read_text().split():
        if int(pid) not in children:
            os.waitpid(int(pid), os.WNOHANG)


def prepare() -> None:
    """Import all that the actions need, but nothing that loads the core."""
    import actions  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.tensor

    import torch_ckpt.dcp.plan.load_planner
    import torch_ckpt.dcp.plan.save_planner  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    if "torch" in sys.argv[1:]:
        prepare()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    children: dict[int, Child] = {}
    count = 0
    for line in sys.stdin:
        request = json.loads(line)
        do, answer = request["do"], {}
        reap_orphans({child.pid for child in children.values()})
        if do in ("start", "run"):
            count += 1
            children[count] = start(request) if do == "start" else run(request)
            answer = {"id": count}
        elif do == "wait":
            answer = wait(children.pop(request["id"]), request["limit"])
        elif do == "kill":
            child = children[request["id"]]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        elif do == "signal":
            answer = {"pids": send_signal(request["name"], request["signal"])}
        else:
            answer = shell(request["command"], request["limit"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
