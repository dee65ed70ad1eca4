"""NeMo AutoModel on this engine: the cases of ranks/automodel.py, and what needs one process."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from launch import HERE, run_ranks

pytest.importorskip("nemo_automodel", reason="nemo_automodel is not installed")

# In this order: the later ones load what the first has saved.
WORLDS = (2, 1, 4)


def case_names() -> list[str]:
    tree = ast.parse((HERE / "ranks/automodel.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "case" for each in node.decorator_list)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("automodel")
    done: dict[int, dict[str, str]] = {}

    def outcome(world: int) -> dict[str, str]:
        for each in WORLDS[: WORLDS.index(world) + 1]:
            if each not in done:
                try:
                    done[each] = run_ranks("automodel", each, folder)
                except Exception as error:
                    done[each] = {"": f"{type(error).__name__}: {error}"}
        return done[world]

    return outcome


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", case_names())
def test_ranks(results: Any, world: int, case: str) -> None:
    outcome = results(world)
    assert outcome.get(f"automodel-{case}", outcome.get("", "did not run")) == "ok"
