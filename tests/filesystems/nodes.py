"""Nodes: processes with a network, mounts, processes, a host name and a boot id of their own.

A switch in the sandbox's own network namespace joins them; nothing else is reached from there."""

from __future__ import annotations

import contextlib
import json
import pathlib
import select
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from .sandbox import TESTS, UNSHARE, environment

NETWORK = "10.77.0"
START_SECONDS = 120
LIMIT_SECONDS = 120


class NodeError(RuntimeError):
    """A node does not do what it is told, or a command on it failed."""


def sh(*command: str) -> str:
    """In the sandbox itself."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise NodeError(f"{' '.join(command)}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def make_switch() -> None:
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "switch", "type", "bridge")
    sh("ip", "link", "set", "switch", "up")


class Node:
    """With `torch` it can run actions; a server does without."""

    def __init__(self, name: str, number: int, folder: pathlib.Path, *, torch: bool = True) -> None:
        self.name, self.number, self.folder, self._torch = name, number, folder, torch
        self.address = f"{NETWORK}.{number}"
        self._process: subprocess.Popen[str] | None = None
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        """Boot it: its boot id is a new one, machine id and host name are as before."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *UNSHARE,
                    sys.executable,
                    str(TESTS / "filesystems" / "agent.py"),
                    *(["torch"] if self._torch else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment(), "GLOO_SOCKET_IFNAME": "eth0"},
            )
        # `unshare` waits; its one child is the first process of the node.
        self._read(START_SECONDS)
        children = pathlib.Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        port, pid = f"port{self.number}", children.read_text().split()[0]
        with contextlib.suppress(NodeError):
            sh("ip", "link", "del", port)
        # The same hardware address after every boot: the others remember it.
        peer = ("peer", "name", "eth0", "address", f"02:00:00:00:00:{self.number:02x}")
        sh("ip", "link", "add", port, "type", "veth", *peer, "netns", pid)
        sh("ip", "link", "set", port, "master", "switch", "up")
        for file, content in {
            "/proc/sys/kernel/random/boot_id": str(uuid.uuid4()),
            "/etc/machine-id": uuid.uuid5(uuid.NAMESPACE_DNS, self.name).hex,
        }.items():
            told = self.folder / f"{self.name}-{pathlib.Path(file).name}"
            told.write_text(content + "\n")
            self.sh(f"test ! -e {file} || mount --bind {told} {file}")
        self.sh(f"hostname {self.name}; ip link set lo up; ip link set eth0 up")
        self.sh(f"ip addr add {self.address}/24 dev eth0")
        hosts = self.folder / f"{self.name}-hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        self.sh(f"mount --bind {hosts} /etc/hosts")

    def stop(self) -> None:
        """As if its power went: every process of it, and with them its mounts."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(60)
        self._process = None

    def cut(self) -> None:
        """Pull its cable: the others do not hear that it has ended."""
        sh("ip", "link", "set", f"port{self.number}", "down")

    def _read(self, limit: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            said = self.log.read_text()[-2000:]
            raise NodeError(f"node {self.name} {'has died' if ready else 'hangs'}: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, *, limit: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise NodeError(f"node {self.name} is down")
        request = {"do": do, "limit": limit, **request}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read(limit + 30)

    def sh(self, command: str, *, limit: float = 60) -> str:
        """The output of a shell command, which must not fail."""
        answer = self.ask("sh", command=command, limit=limit)
        if answer["status"] != 0:
            raise NodeError(f"{self.name}: {command}: {answer['output'].strip()[-1500:]}")
        output: str = answer["output"]
        return output

    def start_action(
        self, action: str, *, environment: Mapping[str, str] | None = None, **args: Any
    ) -> int:
        given = dict(environment or {})
        started: int = self.ask("start", action=action, args=args, environment=given)["id"]
        return started

    def wait(self, child: int, *, limit: float = LIMIT_SECONDS) -> dict[str, Any]:
        """What became of it: "ok" with a value or "error", and "signal", not 0 if one killed it."""
        return self.ask("wait", id=child, limit=limit)

    def outcome(
        self,
        action: str,
        *,
        faults: str = "",
        limit: float = LIMIT_SECONDS,
        **args: Any,
    ) -> dict[str, Any]:
        environment = {"TORCH_CKPT_FAULTS": faults} if faults else {}
        return self.wait(self.start_action(action, environment=environment, **args), limit=limit)

    def call(self, action: str, *, limit: float = LIMIT_SECONDS, **args: Any) -> Any:
        """The result of an action that must not fail."""
        answer = self.outcome(action, limit=limit, **args)
        if "ok" not in answer:
            raise AssertionError(f"{action} on {self.name}: {told(answer)}")
        return answer["ok"]


def told(outcome: dict[str, Any]) -> str:
    """An outcome in one line."""
    if outcome.get("signal"):
        return f"killed by signal {outcome['signal']}"
    if "error" in outcome:
        return f"{outcome['error']['types'][0]}: {outcome['error']['text'].strip()}"
    return f"ok: {outcome.get('ok')}"
