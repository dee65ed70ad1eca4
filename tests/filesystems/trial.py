"""One scenario on one file system, and what scenarios have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .mounts import FileSystem, Site
from .nodes import Node, told

LATE_SECONDS = 25  # until another node sees a commit: sshfs caches for 20
RECOVERY_SECONDS = 90  # for a server that came back to serve all clients again


class Trial:
    """One scenario on one file system: its own folder there, and what all scenarios need."""

    def __init__(self, site: Site, kind: FileSystem, name: str) -> None:
        self.site, self.kind = site, kind
        self.one, self.other = site.nodes[0], site.nodes[-1]
        self.shared = len(site.nodes) > 1
        self.folder = site.mount / name
        self.path = str(self.folder / "c")
        self.late = 0.0
        # On the disk of the machine, which all nodes see.
        self.signs = site.folder / name
        self.signs.mkdir()
        self.one.sh(f"mkdir {self.folder}")

    def sign(self, name: str) -> str:
        return str(self.signs / name)

    def await_sign(self, name: str, limit: float = 30) -> None:
        until = time.monotonic() + limit
        while not (self.signs / name).exists():
            if time.monotonic() > until:
                raise AssertionError(f"no sign of {name} within {limit} s")
            time.sleep(0.01)

    def holds(self, number: int, path: str | None = None, *, load: str = "load") -> None:
        """All nodes load this state, bit for bit: at once, or after the caches of a client have
        shown them an older one, as whole. How late that was at most is in `late`."""
        for node in self.site.nodes:
            begin = time.monotonic()
            older = list(range(number))
            while (
                seen := node.call(load, path=path or self.path, numbers=[number, *older])
            ) < number:
                took = time.monotonic() - begin
                assert took < LATE_SECONDS, f"{node.name} still sees state {seen}, not {number}"
                time.sleep(0.1)
                self.late = max(self.late, took)

    def sooner_or_later(self, node: Node, action: str, **args: Any) -> dict[str, Any]:
        """The outcome of a look; its error only after the time in which caches may show what was
        there before."""
        until = time.monotonic() + LATE_SECONDS
        while "ok" not in (outcome := node.outcome(action, **args)):
            if not self.shared or time.monotonic() > until:
                break
            time.sleep(0.2)
        return outcome

    def lateness(self) -> str:
        return f"; seen up to {self.late:.1f} s late" if self.late else ""

    def nothing_left(self, path: str | None = None) -> None:
        """No staging directory nor lock is left, once every node sees what is there."""
        for node in self.site.nodes:
            until = time.monotonic() + LATE_SECONDS
            while left := node.call("leftovers", path=path or self.path):
                said = f"{node.name} sees what a save has left: {left}"
                assert self.shared and time.monotonic() < until, said
                time.sleep(0.2)


class Scenario(NamedTuple):
    """`run` says in a few words what it saw, and raises AssertionError, which names what does not
    hold. `limit` is in seconds."""

    name: str
    title: str
    run: Callable[[Trial], str]
    limit: int
    shared_only: bool = False


SCENARIOS: dict[str, Scenario] = {}
Run = Callable[[Trial], str]


def scenario(title: str, *, limit: int = 120, shared_only: bool = False) -> Callable[[Run], Run]:
    def enter(run: Run) -> Run:
        SCENARIOS[run.__name__] = Scenario(run.__name__, title, run, limit, shared_only)
        return run

    return enter


def save_until_done(
    node: Node, limit: float, *, action: str = "save", **args: Any
) -> tuple[float, list[str]]:
    """Save again and again until it succeeds: seconds, and the errors on the way."""
    begin = time.monotonic()
    errors: list[str] = []
    while True:
        outcome = node.outcome(action, **args)
        if "ok" in outcome:
            return time.monotonic() - begin, sorted(set(errors))
        errors.append(told(outcome))
        if time.monotonic() - begin > limit:
            raise AssertionError(f"no save within {limit} s: {errors[-1]}")
        time.sleep(1)
