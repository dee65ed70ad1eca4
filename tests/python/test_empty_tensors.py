"""DTensors without elements, by two ranks: the cases are in ranks/empty_tensors.py."""

from __future__ import annotations

from typing import Any

import pytest
from launch import run_ranks
from ranks import empty_tensors


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks("empty_tensors", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", empty_tensors.CASES)
def test_by_two_ranks(outcome: dict[str, str], case: str) -> None:
    assert outcome.get(case, outcome.get("", "was not run")) == "ok"
