"""Whether a lock that one node holds keeps the other one out."""

from __future__ import annotations

import time

from .facts import LOCKS
from .mounts import Site
from .nodes import NodeError, told


def lock_facts(site: Site) -> dict[str, str]:
    facts = {}
    for kind, title in LOCKS.items():
        path = site.mount / kind.replace(" ", "-")
        site.nodes[0].sh(f"mkdir {path}" if "directory" in kind else f"touch {path}")
        ready, release = site.folder / f"{path.name}-ready", site.folder / f"{path.name}-release"
        holder = site.nodes[0].start_action(
            "hold_lock", kind=kind, path=str(path), ready=str(ready), release=str(release)
        )
        until = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.02)
        if ready.exists():
            facts[f"{title} keeps another node out"] = site.nodes[1].call(
                "try_lock", kind=kind, path=str(path)
            )
        release.touch()
        end = site.nodes[0].wait(holder)
        if "ok" not in end:
            raise NodeError(f"{title}: {told(end)}")
    return facts
