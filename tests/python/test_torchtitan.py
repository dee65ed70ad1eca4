"""torchtitan's real checkpoint manager: the cases are in ranks/torchtitan.py. Its package is not
installed in CI; ./dev campaign optional runs these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

# In this order: what two ranks have saved, others load.
WORLDS = (2, 1, 4)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("titan")
    return {world: run_ranks("torchtitan", world, folder, timeout=1200) for world in WORLDS}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_cases(world: int, outcome: dict[int, dict[str, str]]) -> None:
    assert outcome[world]
    bad = {name: said for name, said in outcome[world].items() if said != "ok"}
    assert not bad, "\n".join(f"{name}: {said}" for name, said in bad.items())
