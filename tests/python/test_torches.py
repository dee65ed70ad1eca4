"""`./dev torches`: what it installs, what it makes of pytest's words, and its page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.torches import __main__ as torches  # noqa: E402
from tests.torches import environments  # noqa: E402

ASKED = [
    "filelock",
    "cuda-toolkit[cublas,cudart]==13.2.2; platform_system == 'Linux'",
    "cuda-bindings<14,>=13.0.3; platform_system == 'Linux'",
    "nvidia-cudnn-cu13==9.26.0.51",
    "triton~=3.9.0; platform_system == 'Linux'",
    "optree>=0.13.0; extra == 'optree'",
]
SAID = """
....F.sE
=== short test summary info ===
SKIPPED [1] tests/python/test_a.py:3: no fault points
FAILED tests/python/test_a.py::test_one[x, y] - AssertionError: 1
ERROR tests/python/test_b.py::test_two
1 failed, 5 passed, 1 skipped, 1 warning, 1 error in 12.50s
"""


def test_an_environment_gets_what_import_needs() -> None:
    found = [each.split("=")[0] for each in environments.needed(ASKED)]
    assert found == ["filelock", "cuda-toolkit[cublas,cudart]", "nvidia-cudnn-cu13"]


def test_what_pytest_said_is_counted_and_named() -> None:
    assert torches.counts(SAID) == {"failed": 1, "passed": 5, "skipped": 1, "error": 1}
    assert torches.failures(SAID) == ["test_a.py::test_one[x, y]", "test_b.py::test_two"]
    assert torches.counts("Segmentation fault") == {}


def test_what_pip_says_is_wrong_is_one_line() -> None:
    said = """ERROR: Ignored the following versions that require a different python version: 2.3.0
ERROR: Could not find a version that satisfies the requirement x>=5 (from versions: 1, 2)
ERROR: No matching distribution found for x>=5
"""
    expected = "Could not find a version that satisfies the requirement x>=5"
    assert environments.last_words(said) == expected


def test_what_cannot_be_had_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    record = torches.try_one("2.13.0", "3.99", "")
    assert record["outcome"] == "could not be had: no Python 3.99 on PATH or of pyenv"

    def refuse(into: Path, *words: str) -> None:
        assert into.is_relative_to(tmp_path) and into.exists()
        raise environments.NotHad("No matching distribution found for torch==9.9")

    monkeypatch.setattr(environments, "install", refuse)
    record = torches.try_one("9.9", torches.HERE, "")
    assert record["outcome"] == "could not be had: No matching distribution found for torch==9.9"
    assert os.listdir(tmp_path) == []  # the environment has gone


def test_the_page_names_what_failed() -> None:
    at = {"commit": "abc", "date": "2026-11-26"}
    good = {"torch": "2.13.0+cpu", "python": "3.11.7", "gb": 0.91, "outcome": "passed: 900 tests"}
    bad = {
        "torch": "9.9",
        "python": "3.11.7",
        "gb": 0.0,
        "outcome": "1 failed",
        "failed": ["a[x|y]"],
    }
    text = torches.page({f"2.13.0@{torches.HERE}": {**at, **good}, "9.9@3.11": {**at, **bad}})
    assert "| 2.13.0+cpu | 3.11.7 | 0.9 GB | passed: 900 tests | abc, 2026-11-26 |\n" in text
    assert "| 2.10.0 | 3.10 |  | not tried yet |  |\n" in text
    assert text.endswith("\n- 9.9, Python 3.11.7: `a[x|y]`\n")


def test_the_tests_of_the_operators_and_of_dcp_are_among_them() -> None:
    names = {Path(file).name for file in torches.tests()}
    assert {"test_operators.py", "test_patch_torch.py", "test_ranks.py"} <= names
    assert "test_package.py" not in names


def test_the_page_is_what_the_records_say() -> None:
    printed = torches.PAGE.read_text().splitlines()
    records = torches.recorded()
    rows = [row for row in torches.page(records).splitlines() if "not tried yet" not in row]
    assert len(records) >= 6
    assert [row for row in rows if row.startswith("| 2.") and row not in printed] == []
