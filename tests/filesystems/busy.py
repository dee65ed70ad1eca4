"""A node that saves without end beside one that loads, and what must be so afterwards."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .nodes import told
from .trial import RECOVERY_SECONDS, Trial, save_until_done


@contextlib.contextmanager
def busy(trial: Trial) -> Iterator[dict[str, Any]]:
    """One node saves and the other loads meanwhile; what is yielded gets what became of both."""
    seen: dict[str, Any] = {}
    trial.one.call("save_large", path=trial.path, number=1, mib=8)
    done = trial.sign("done")
    saver = trial.one.start_action("save_until", path=trial.path, first=2, done=done, mib=8)
    loader = trial.other.start_action(
        "load_until", path=trial.path, numbers=list(range(10_000)), done=done, mib=8
    )
    time.sleep(2)
    try:
        yield seen
    finally:
        Path(done).touch()
        ends = trial.one.wait(saver, limit=90), trial.other.wait(loader, limit=90)
    for end in ends:
        assert "ok" in end, told(end)
    seen["saves"], seen["loads"] = (end["ok"] for end in ends)


def is_replaced(text: str) -> bool:
    """What a reader may always hear beside a saver."""
    return text.startswith(("ConflictError", "ReplacedError")) and "replaced" in text


def come_to(trial: Trial, numbers: list[int], mib: int = 8) -> None:
    """Until every node loads one of these states."""
    until = time.monotonic() + RECOVERY_SECONDS
    for node in trial.site.nodes:
        while True:
            outcome = node.outcome("load_large", path=trial.path, numbers=numbers, mib=mib)
            if "ok" in outcome:
                break
            said = f"one of {numbers[0]} to {numbers[-1]} is to be there; {node.name}"
            assert time.monotonic() < until, f"{said}: {told(outcome)}"
            time.sleep(1)


def after(trial: Trial, seen: dict[str, Any], *allowed: str) -> str:
    """The state is whole, no acknowledged one is lost, and the next save succeeds. What was raised
    meanwhile is of the classes that are `allowed`, or said that it is replaced."""
    saves, loads = seen["saves"], seen["loads"]
    first, last = max(1, saves["acknowledged"]), saves["begun"]
    come_to(trial, list(range(first, last + 1)))
    following = {"action": "save_large", "number": last + 1, "mib": 8}
    took, _ = save_until_done(trial.other, RECOVERY_SECONDS, path=trial.path, **following)
    come_to(trial, [last + 1])
    trial.nothing_left()
    errors = [(who, text) for who in ("saves", "loads") for text in seen[who]["errors"]]
    wrong = [
        f"{who}: {text}"
        for who, text in errors
        if text.split(":")[0] not in allowed and not is_replaced(text)
    ]
    done = last - 1 - len(saves["errors"])
    beside = f"{done} saves and {loads['loads']} loads beside them"
    assert not wrong, f"{beside}, {len(wrong)} errors of {len(errors)}: {' // '.join(wrong[:4])}"
    counts = collections.Counter(text.split(":")[0] for _, text in errors)
    named = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no error"
    return f"{beside}, {named}; next save in {took:.1f} s"
