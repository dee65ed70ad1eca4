"""A save that is killed at any of its system calls leaves the old checkpoint or the new one."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

KILLED = {
    **dict.fromkeys(("fresh", "overwrite", "async", "final", "consolidate"), 110),
    # The same commit, by Megatron's calls.
    **dict.fromkeys(("megatron_fresh", "megatron_overwrite", "megatron_async"), 40),
}


@pytest.mark.parametrize("name", KILLED)
def test_killed_at_any_call(make_scenario: Any, name: str) -> None:
    scenario = make_scenario(name)
    hit, killed, paths = scenario.sample(KILLED[name]), [], []
    for fault, path, outcome in scenario.run([f"*:{nth}:kill" for nth in hit]):
        assert outcome["signal"] in (0, signal.SIGKILL), (fault, outcome)
        if not outcome["signal"]:
            assert "ok" in outcome, (fault, outcome)
        killed.append(bool(outcome["signal"]))
        paths.append(path)
    found = [answer["found"] for answer in scenario.check(paths)]
    # Once new, always new, as far as runs are alike; both were seen, or the kills missed the commit.
    assert found[0] == (None if scenario.is_fresh else 1)
    assert found[-1] == 2
    # So few calls follow the commit of a fresh save that all kills may miss them.
    after = any(dead and state == 2 for dead, state in zip(killed, found, strict=True))
    assert after or scenario.is_fresh
    last_old = max(nth for nth, state in zip(hit, found, strict=True) if state != 2)
    assert last_old - hit[found.index(2)] <= scenario.jitter


@pytest.mark.parametrize("name", ["fresh", "overwrite"])
def test_recovery_is_killed_too(make_scenario: Any, server: Any, name: str) -> None:
    """Kill a save around its commit, kill the next one in its clean-up or replay, and look."""
    scenario = make_scenario(name)
    last = scenario.calls()
    step = 1 if scenario.full else 4
    faults = [f"*:{nth}:kill" for nth in range(last - 48, last, step)]
    paths = []
    for i, (_, path, _) in enumerate(scenario.run(faults)):
        server.outcome("save", faults=f"*:{20 + 7 * i % 50}:kill", path=path, number=2)
        paths.append(path)
    scenario.check(paths)


def test_a_killed_consolidation_is_in_nobodys_way(make_scenario: Any, server: Any) -> None:
    scenario = make_scenario("consolidate")
    for _, path, _ in scenario.run([f"*:{nth}:kill" for nth in scenario.sample(30)]):
        server.call("consolidate", source=str(scenario.source), path=path)
        assert server.call("load", path=path, numbers=[2]) == 2
        left = {name for name in os.listdir(path) if "stage" in name or name == "commit.json"}
        assert left == set(), left
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_killed_while_tensors_are_removed(
    fault_points: None, server: Any, full: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The checkpoint is there with them or without them, and the next removal finishes it."""
    server.call("save_megatron", path=str(tmp_path / "template"))
    paths = []
    for nth in itertools.count(1, 1 if full else 7):
        path = tmp_path / str(nth) / "c"
        shutil.copytree(tmp_path / "template", path)
        paths.append(str(path))
        outcome = server.outcome("remove_tensors", faults=f"*:{nth}:kill", path=str(path))
        if not outcome["signal"]:
            assert "ok" in outcome, outcome
            break
    there = server.call("whole_megatron", paths=paths)
    assert there[0] and not there[-1]
    for path in paths[:-1]:
        server.call("remove_tensors", path=path)
    assert not any(server.call("whole_megatron", paths=paths))
    killed = len(paths) - 1
    print(f"tried: {len(paths)} faults in {request.node.name}: {killed} killed, 1 succeeded")
