"""Processes and nodes that end in the middle of a save."""

from __future__ import annotations

import collections
import signal

from .launch import run_ranks
from .nodes import told
from .trial import RECOVERY_SECONDS, Trial, save_until_done, scenario


@scenario("a process is killed at any call, another node goes on", limit=600)
def killed_anywhere(trial: Trial) -> str:
    """At calls spread over the whole save; who looks and saves next is on the other node."""
    found: collections.Counter[str] = collections.Counter()
    last = calls_of_a_save(trial)
    for number, nth in enumerate(sorted({1 + i * (last - 1) // 23 for i in range(24)})):
        path = f"{trial.folder}/{number}"
        trial.one.call("save", path=path, number=1)
        outcome = trial.one.outcome("save", faults=f"*:{nth}:kill", path=path, number=2)
        assert outcome["signal"] == signal.SIGKILL or "ok" in outcome, told(outcome)
        seen = trial.other.call("load", path=path, numbers=[1, 2])
        found["the old" if seen == 1 else "the new"] += 1
        answer = trial.other.outcome("save", path=path, number=3)
        assert "ok" in answer, f"killed at call {nth}: the next save says {told(answer)}"
        trial.holds(3, path)
        trial.nothing_left(path)
    assert len(found) == 2, f"only {found}: the kills missed the commit"
    return f"{found.total()} kills: then {found['the old']} x the old, {found['the new']} x the new{trial.lateness()}"


def calls_of_a_save(trial: Trial) -> int:
    """How many system calls an overwriting save makes, about."""
    low, high = 0, 64
    path = f"{trial.folder}/count"

    def killed(nth: int) -> bool:
        trial.one.call("save", path=path, number=1)
        outcome = trial.one.outcome("save", faults=f"*:{nth}:kill", path=path, number=2)
        return bool(outcome["signal"])

    while killed(high):
        low, high = high, 2 * high
    while high - low > 4:
        middle = (low + high) // 2
        low, high = (middle, high) if killed(middle) else (low, middle)
    return low


# Of the coordinator's node and of the other one: where the process is killed, with its node.
PHASES = (
    (0, "begin", "mkdirat:1:kill"),
    (0, "write", "pwrite:5:kill"),
    (1, "write", "pwrite:1:kill"),
    (1, "sync", "fsync:1:kill"),
    (0, "sync", "fsync:3:kill"),
    (0, "rename", "renameat:3:kill"),
    (0, "replay", "renameat:4:kill"),
)


@scenario("a node of two loses power, in every phase of a save", limit=420, shared_only=True)
def node_killed(trial: Trial) -> str:
    """The process is killed at a call, then every process of its node, its mount's client too. The
    last time the cable is pulled first, so that the server hears nothing of it."""
    said, slowest, silent = [], 0.0, ""
    for number, (rank, phase, fault) in enumerate(PHASES):
        path, victim = f"{trial.folder}/{number}", trial.site.nodes[rank]
        survivor = trial.site.nodes[1 - rank]
        run_ranks(trial, path, 1)
        outcomes = run_ranks(trial, path, 2, {rank: fault}, cut=number == len(PHASES) - 1)
        reached = outcomes[rank]["signal"] == signal.SIGKILL
        said.append(f"{phase} of rank {rank}: {'killed' if reached else 'not reached'}")
        victim.stop()
        found = survivor.call("load_ranks", path=path, numbers=[1, 2])
        took, errors = save_until_done(
            survivor, RECOVERY_SECONDS, action="save_alone", path=path, number=3
        )
        slowest = max(slowest, took)
        if errors:
            silent = f"; next save after {took:.0f} s of {'; '.join(errors)}"
        victim.start()
        trial.kind.mount(trial.site, victim)
        assert found in (1, 2)
        trial.holds(3, path, load="load_ranks")
        trial.nothing_left(path)
    killed = sum(line.endswith(": killed") for line in said)
    assert killed >= 5, f"kills that were not reached: {said}"
    return f"{killed} phases{silent}"
