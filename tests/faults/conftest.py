"""The fork server of the fault tests."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent
AT_A_TIME = 2
# By how many calls two runs of one save may differ: a worker thread that finds work takes memory
# of its own (mmap, three times madvise, munmap), and how many find any is a matter of luck.
JITTER = 15
# Every call instead of a sample: TORCH_CKPT_FULL=1 pytest tests/faults
FULL = os.environ.get("TORCH_CKPT_FULL", "") not in ("", "0")


class Server:
    """Runs actions of fault_actions.py in children of one process."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("TORCH_CKPT_FAULTS", None)
        self.calls: dict[str, int] = {}  # by scenario, see Scenario.calls
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server has died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, action: str, *, faults: str = "", **args: Any) -> int:
        request = {"do": "start", "action": action, "args": args, "faults": faults}
        started: int = self._ask(request)["id"]
        return started

    def wait(self, child: int) -> dict[str, Any]:
        return self._ask({"do": "wait", "id": child})

    def outcome(self, action: str, *, faults: str = "", **args: Any) -> dict[str, Any]:
        return self.wait(self.start(action, faults=faults, **args))

    def call(self, action: str, **args: Any) -> Any:
        """The result of an action that must not fail."""
        answer = self.outcome(action, **args)
        assert "ok" in answer, answer
        return answer["ok"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    try:
        yield running
    finally:
        running.close()


# What a scenario does, where it is not `save`.
ACTIONS = {
    "async": "async_save",
    "final": "save_final",
    "megatron_fresh": "save_sharded",
    "megatron_overwrite": "save_sharded",
    "megatron_async": "async_save_sharded",
}


class Scenario:
    """A save of state 2 over what was there before, repeatable from a template."""

    full, jitter = FULL, JITTER

    def __init__(self, name: str, server: Server, root: pathlib.Path) -> None:
        self.name, self.server, self.root, self.count = name, server, root, 0
        self.is_fresh = name in ("fresh", "megatron_fresh")
        self.numbers = [2] if self.is_fresh else [1, 2]
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.template = root / "template"
        self.source = root / "source"
        if name in ("overwrite", "async", "final"):
            server.call("save", path=str(self.template), number=1)
        if name in ("megatron_overwrite", "megatron_async"):
            server.call("save_sharded", path=str(self.template), number=1)
        if name == "consolidate":
            old = root / "old"
            server.call("save", path=str(old), number=1)
            server.call("consolidate", source=str(old), path=str(self.template))
            server.call("save", path=str(self.source), number=2)

    def start(self, faults: str) -> tuple[str, int]:
        """Start it under `faults`: the target directory and the child."""
        self.count += 1
        path = self.root / "runs" / str(self.count) / "c"
        path.parent.mkdir(parents=True)
        if self.template.exists():
            shutil.copytree(self.template, path)
        args: dict[str, Any] = {"path": str(path)}
        if self.name == "consolidate":
            args["source"] = str(self.source)
            return str(path), self.server.start("consolidate", faults=faults, **args)
        action = ACTIONS.get(self.name, "save")
        return str(path), self.server.start(action, faults=faults, number=2, **args)

    def run(self, faults: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Run it under each of `faults`, a few at a time: faults, target and outcome."""
        waiting: list[tuple[str, str, int]] = []
        for fault in faults:
            waiting.append((fault, *self.start(fault)))
            if len(waiting) == AT_A_TIME:
                yield self._ended(*waiting.pop(0))
        for started in waiting:
            yield self._ended(*started)

    def _ended(self, fault: str, path: str, child: int) -> tuple[str, str, dict[str, Any]]:
        outcome = self.server.wait(child)
        kind = "killed" if outcome["signal"] else "succeeded" if "ok" in outcome else "failed"
        self.outcomes[kind] += 1
        return fault, path, outcome

    def _killed_at(self, nth: int) -> bool:
        _, child = self.start(f"*:{nth}:kill")
        return bool(self.server.wait(child)["signal"])

    def calls(self) -> int:
        """How many system calls the save makes, JITTER more or less."""
        known = self.server.calls
        if self.name not in known:
            low, high = 0, 128
            while self._killed_at(high):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._killed_at(middle) else (low, middle)
            known[self.name] = low
        return known[self.name]

    def sample(self, whole: int) -> list[int]:
        """Which calls to hit: in a full run all and some more, else `whole` of them."""
        last = self.calls() + JITTER  # never too few; a fault too late is no fault
        if FULL:
            return list(range(1, last + 1))
        return sorted({1 + i * (last - 1) // (whole - 1) for i in range(whole)})

    def check(self, paths: list[str]) -> list[dict[str, Any]]:
        """Every path holds the old state or the new one, and the next save leaves nothing."""
        inspect = "inspect_sharded" if self.name.startswith("megatron") else "inspect"
        answers: list[dict[str, Any]] = self.server.call(
            inspect, paths=paths, numbers=self.numbers, following=3
        )
        for answer in answers:
            if not self.is_fresh:
                assert answer["found"] is not None, answer
            assert answer["then"] == 3, answer
            assert answer["leftovers"] == [], answer
        return answers


@pytest.fixture
def full() -> bool:
    """Whether every call is tried, and no sample."""
    return FULL


@pytest.fixture
def make_scenario(
    fault_points: None, server: Server, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Any]:
    made: list[Scenario] = []

    def make(name: str) -> Scenario:
        made.append(Scenario(name, server, tmp_path))
        return made[-1]

    yield make
    # For ./dev campaign.
    outcomes = sum((scenario.outcomes for scenario in made), collections.Counter())
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))
    print(f"tried: {outcomes.total()} faults in {request.node.name}: {said}")
