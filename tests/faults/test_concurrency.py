"""Two savers, and readers beside a saver, in processes of their own."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import pytest


def snapshot(root: pathlib.Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("existing", [False, True])
def test_the_second_save_loses_before_any_byte(
    server: Any, tmp_path: pathlib.Path, existing: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    path = str(root / "c")
    if existing:
        server.call("save", path=path, number=1)
    ready, release = tmp_path / "ready", tmp_path / "release"
    first = server.start("hold", path=path, ready=str(ready), release=str(release), number=2)
    while not ready.exists():
        time.sleep(0.005)
    before = snapshot(root)
    outcome = server.outcome("save", path=path, number=3)
    assert "ConflictError" in outcome["error"]["types"], outcome
    assert "in progress" in outcome["error"]["text"]
    assert snapshot(root) == before
    release.touch()
    assert "ok" in server.wait(first)
    assert server.call("load", path=path, numbers=[2]) == 2
    assert server.call("leftovers", path=path) == []


def test_races_have_one_winner_or_an_order(server: Any, tmp_path: pathlib.Path) -> None:
    """Savers that start together: each succeeds or is refused, and the end is one that succeeded."""
    for round_ in range(6):
        path, start = str(tmp_path / "c"), tmp_path / f"start-{round_}"
        numbers = [10 * round_ + i for i in (1, 2, 3)]
        children = [
            server.start("save_at", path=path, number=number, start=str(start))
            for number in numbers
        ]
        time.sleep(0.25)
        start.touch()
        outcomes = [server.wait(child) for child in children]
        won = [number for number, o in zip(numbers, outcomes, strict=True) if "ok" in o]
        for outcome in outcomes:
            if "ok" not in outcome:
                assert "ConflictError" in outcome["error"]["types"], outcome
        assert won
        assert server.call("load", path=path, numbers=won) in won
        assert server.call("leftovers", path=path) == []


def test_readers_beside_a_saver(server: Any, tmp_path: pathlib.Path) -> None:
    path, done = str(tmp_path / "c"), str(tmp_path / "done")
    numbers = list(range(1, 31))
    server.call("save", path=path, number=1)
    readers = [server.start("load_many", path=path, numbers=numbers, done=done) for _ in range(2)]
    try:
        server.call("overwrite_many", path=path, numbers=numbers, done=done)
    finally:
        pathlib.Path(done).touch()
        outcomes = [server.wait(reader) for reader in readers]
    for outcome in outcomes:
        assert "ok" in outcome, outcome
        assert outcome["ok"]["loads"] > 0
    assert server.call("load", path=path, numbers=[30]) == 30
    assert not os.path.exists(path + ".new")
