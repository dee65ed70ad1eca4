"""A system call that fails is a clear error; one that is interrupted or short is none."""

from __future__ import annotations

import bisect
import errno
import pathlib
import subprocess
from typing import Any

import pytest

ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EMFILE"]


def faults_of(scenario: Any, whole: int, actions: list[str]) -> list[str]:
    """In a full run every action at every call, else the actions in turn."""
    calls = scenario.sample(whole)
    if scenario.full:
        return [f"*:{nth}:{action}" for nth in calls for action in actions]
    return [f"*:{nth}:{actions[i % len(actions)]}" for i, nth in enumerate(calls)]


@pytest.mark.parametrize("name", ["fresh", "overwrite", "async", "final", "consolidate"])
def test_an_error_of_any_call(make_scenario: Any, name: str) -> None:
    scenario = make_scenario(name)
    paths, failed = [], 0
    for fault, path, outcome in scenario.run(faults_of(scenario, 90, ERRORS)):
        assert outcome["signal"] == 0, (fault, outcome)
        paths.append(path)
        if "ok" in outcome:  # a hint, or something that is tried another way
            assert scenario.server.call("load", path=path, numbers=[2]) == 2
            continue
        failed += 1
        error = outcome["error"]
        assert {"OSError", "CheckpointError"} & set(error["types"]), (fault, error)
        if "OSError" in error["types"]:
            assert errno.errorcode[error["errno"]] == fault.split(":")[2], (fault, error)
            assert error["file"], (fault, error)
        assert error["text"], (fault, error)
    assert failed > len(paths) // 2
    scenario.check(paths)


# What comes after the commit point and only tidies up: the syncs behind the removal of the
# journal, and of the directory that it was in.
TIDYING = {"fresh": 0, "overwrite": 2, "final": 2, "consolidate": 2}


@pytest.mark.parametrize("name", TIDYING)
def test_a_sync_that_fails_fails_the_save(make_scenario: Any, name: str) -> None:
    scenario = make_scenario(name)

    def happens(nth: int) -> bool:
        _, child = scenario.start(f"fsync:{nth}:kill")
        return bool(scenario.server.wait(child)["signal"])

    syncs = bisect.bisect_left(range(1, 100), True, key=lambda nth: not happens(nth))
    assert syncs > 4
    outcomes = scenario.run([f"fsync:{nth}:EIO" for nth in range(1, syncs + 1)])
    unseen = [fault for fault, _, outcome in outcomes if "ok" in outcome]
    last = range(syncs + 1 - TIDYING[name], syncs + 1)
    assert unseen == [f"fsync:{nth}:EIO" for nth in last]


@pytest.mark.parametrize("name", ["overwrite", "final", "consolidate"])
def test_interrupts_and_short_counts_change_nothing(make_scenario: Any, name: str) -> None:
    scenario = make_scenario(name)
    paths = []
    for fault, path, outcome in scenario.run(faults_of(scenario, 60, ["EINTR", "short"])):
        if "mmap of" in outcome.get("error", {}).get("text", ""):
            continue  # a call that no signal interrupts
        assert "ok" in outcome, (fault, outcome)
        paths.append(path)
    assert all(answer["found"] == 2 for answer in scenario.check(paths))


def test_full_disk(server: Any, tmp_path: pathlib.Path) -> None:
    """A real one: a save that does not fit leaves the old one, and a later save works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        path = str(disk / "c")
        server.call("save", path=path, number=1)
        outcome = server.outcome("save_large", path=path, elements=1 << 20)
        assert outcome["error"]["errno"] == errno.ENOSPC, outcome
        assert outcome["error"]["file"].startswith(path), outcome
        assert server.call("leftovers", path=path) == []
        assert server.call("load", path=path, numbers=[1]) == 1
        server.call("save", path=path, number=2)
        assert server.call("load", path=path, numbers=[2]) == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)
