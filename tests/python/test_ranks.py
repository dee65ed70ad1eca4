"""Everything that needs several processes: the cases are in ranks/, one launch runs many."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from launch import run_ranks

# Modules that run one after the other in one launch, and how many ranks. In this order: the later
# launches of "reshard", "wrapped" and "clients_reload" load what earlier ones have saved.
LAUNCHES = [
    (
        "sharding,saving,failures,differing,consolidation,final,two_layouts,frameworks,reshard,wrapped,training,scaled,trajectories,dist_checkpointing,dist_errors,dist_async,dist_deliveries",
        4,
    ),
    (
        "saving,failures,differing,asynchronous,consolidation,two_layouts,directories,empty_tensors,reshard,wrapped,training,scaled,trajectories,"
        "dist_checkpointing,dist_errors,dist_async,dist_deliveries,dist_random",
        2,
    ),
    ("agreements,reshard,wrapped,training,scaled,trajectories", 3),
    (
        "reshard,wrapped,training,scaled,trajectories,dist_checkpointing,dist_errors,dist_async,dist_deliveries",
        1,
    ),
    ("clients", 2),
    ("clients_reload", 2),
    ("clients_reload", 1),
]
# What the others nearly cover, and more ranks than there are cores: ./dev campaign runs them.
CAMPAIGN = [
    ("sharding", 2),
    ("asynchronous", 4),
    ("directories", 4),
    ("agreements", 8),
    ("training,trajectories", 8),
    ("dist_checkpointing,dist_errors,dist_async,dist_deliveries", 3),
    *(("dist_random", world) for world in (1, 3, 4, 5, 6, 7, 8)),
    *(("final", world) for world in (1, 2, 3, 5, 6, 7, 8)),
    *(("two_layouts", world) for world in (1, 3, 5, 8)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outcomes of a launch, run when its first case is asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    done: dict[tuple[str, int], dict[str, str]] = {}

    def outcome(modules: str, world: int) -> dict[str, str]:
        if (modules, world) not in done:
            try:
                done[modules, world] = run_ranks(modules, world, folder)
            except Exception as error:  # of the launch, which is not tried again for each case
                done[modules, world] = {"": f"{type(error).__name__}: {error}"}
        return done[modules, world]

    return outcome


@pytest.mark.parametrize(
    ("modules", "world", "case"),
    [
        pytest.param(
            *(modules, world, f"{module}-{case}"),
            id=f"{module}-{world}-{case}",
            marks=[pytest.mark.campaign] if (modules, world) in CAMPAIGN else [],
        )
        for modules, world in LAUNCHES + CAMPAIGN
        for module in modules.split(",")
        for case in importlib.import_module(f"ranks.{module}").CASES
    ],
)
def test_case(results: Any, modules: str, world: int, case: str) -> None:
    outcome = results(modules, world)
    assert case in outcome, outcome.get("", "the launch ended before this case")
    assert outcome[case] == "ok", outcome[case]
