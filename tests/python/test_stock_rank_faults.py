"""Faults of stock that need several processes: the cases are in ranks/stock_faults.py."""

from __future__ import annotations

import pytest
from launch import run_ranks
from ranks import stock_faults


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_ranks("stock_faults", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", stock_faults.CASES)
def test_case(outcome: dict[str, str], case: str) -> None:
    assert case in outcome, outcome.get("", "the launch ended before this case")
    assert outcome[case] == "ok", outcome[case]
