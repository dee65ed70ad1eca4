"""Ranks on the nodes: by torchrun, and one on each node without it."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from .mounts import Site
from .nodes import told
from .sandbox import TESTS, environment
from .trial import Trial


def torchrun(site: Site) -> tuple[dict[str, str], dict[str, float]]:
    """Four ranks, on one node or two each on two: what every case of ranks/filesystem.py came to
    ("ok" or an error), and the speeds."""
    results, speeds = site.folder / "ranks.json", site.folder / "speeds.json"
    port = str(random.randint(20_000, 30_000))
    children = []
    for number, node in enumerate(site.nodes):
        path = f"{environment()['PYTHONPATH']}:{TESTS / 'python'}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(site.nodes)), "--node-rank", str(number)),
            *("--nproc-per-node", str(4 // len(site.nodes))),
            *("--master-addr", site.nodes[0].address, "--master-port", port),
            *("-m", "ranks.run", "filesystem", str(site.mount / "ranks"), str(results)),
        ]
        given = {"PYTHONPATH": path, "SPEED_FILE": str(speeds), "RANKS_TIMEOUT": "60"}
        children.append(node.ask("run", command=command, environment=given)["id"])
    ends = [node.wait(child, limit=400) for node, child in zip(site.nodes, children, strict=True)]
    cases = json.loads(results.read_text()) if results.exists() else {}
    outcome = {case.removeprefix("filesystem-"): str(said) for case, said in cases.items()}
    if any("ok" not in end or end["ok"]["status"] != 0 for end in ends):
        said = [end["ok"]["output"][-1500:] if "ok" in end else told(end) for end in ends]
        parts = [file.read_text()[-1500:] for file in sorted(site.folder.glob("ranks.json.*"))]
        outcome["torchrun"] = "\n".join(["torchrun failed", *parts, *said])
    return outcome, json.loads(speeds.read_text()) if speeds.exists() else {}


def run_ranks(
    trial: Trial,
    path: str,
    number: int,
    faults: dict[int, str] | None = None,
    *,
    cut: bool = False,
    turned: bool = False,
) -> list[dict[str, Any]]:
    """A save by one rank on each node; without faults all must succeed. With `cut` the cable of
    the node that is killed is pulled when it is; `turned`: rank 0 is on the second node."""
    nodes = [trial.other, trial.one] if turned else [trial.one, trial.other]
    port = str(random.randint(20_000, 30_000))
    children = []
    for rank, node in enumerate(nodes):
        given = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": port,
            "TORCH_CKPT_FAULTS": (faults or {}).get(rank, ""),
        }
        given = {key: value for key, value in given.items() if value}
        children.append(
            node.start_action("save_as_rank", environment=given, path=path, number=number)
        )
    outcomes: dict[int, dict[str, Any]] = {}
    for rank in sorted(range(len(nodes)), key=lambda rank: rank not in (faults or {})):
        outcomes[rank] = nodes[rank].wait(children[rank], limit=60)
        if faults and rank in faults and cut:
            nodes[rank].cut()
    if not faults:
        said = {rank: told(outcome) for rank, outcome in outcomes.items()}
        assert all("ok" in outcome for outcome in outcomes.values()), said
    return [outcomes[rank] for rank in range(len(nodes))]
