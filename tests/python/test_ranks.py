"""Everything that needs several processes: the cases are in ranks/, one launch runs many."""

from __future__ import annotations

from typing import Any

import pytest
from launch import run_ranks
from ranks import (
    agreements,
    asynchronous,
    consolidation,
    directories,
    final,
    frameworks,
    reshard,
    saving,
    sharding,
)

MODULES = {
    "agreements": agreements,
    "sharding": sharding,
    "saving": saving,
    "asynchronous": asynchronous,
    "consolidation": consolidation,
    "directories": directories,
    "final": final,
    "frameworks": frameworks,
    "reshard": reshard,
}
# In this order: the launches of "reshard" load what the ones before have saved.
LAUNCHES = [
    ("agreements", 3),
    ("sharding", 4),
    ("saving", 2),
    ("saving", 4),
    ("asynchronous", 2),
    ("consolidation", 2),
    ("consolidation", 4),
    ("directories", 2),
    ("final", 4),
    ("frameworks", 4),
    ("reshard", 4),
    ("reshard", 2),
    ("reshard", 3),
    ("reshard", 1),
]
# What the others nearly cover, and more ranks than there are cores: ./dev campaign runs them.
CAMPAIGN = [
    ("sharding", 2),
    ("asynchronous", 4),
    ("directories", 4),
    *(("final", world) for world in (1, 2, 3, 5, 6, 7, 8)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outcomes of a launch, run when its first case is asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    done: dict[tuple[str, int], dict[str, str]] = {}

    def outcome(module: str, world: int) -> dict[str, str]:
        if (module, world) not in done:
            done[module, world] = run_ranks(module, world, folder)
        return done[module, world]

    return outcome


@pytest.mark.parametrize(
    ("module", "world", "case"),
    [
        pytest.param(
            *(module, world, case),
            id=f"{module}-{world}-{case}",
            marks=[pytest.mark.campaign] if (module, world) in CAMPAIGN else [],
        )
        for module, world in LAUNCHES + CAMPAIGN
        for case in MODULES[module].CASES
    ],
)
def test_case(results: Any, module: str, world: int, case: str) -> None:
    outcome = results(module, world)
    assert case in outcome, outcome.get("", "the launch ended before this case")
    assert outcome[case] == "ok", outcome[case]
