"""`./dev campaign`: what it makes of what its parts print, and its page."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.campaign import __main__ as campaign  # noqa: E402
from tests.campaign import optional  # noqa: E402
from tests.torches import environments  # noqa: E402

FUZZED = """
== header_fuzz for 3600 s
INFO: Running with entropic power schedule (0xFF, 100).
stat::number_of_executed_units: 2833293
stat::average_exec_per_sec:     787
== zip_fuzz for 90 s
stat::number_of_executed_units: 12
"""
TESTED = """
tried: 724 faults in test_an_error_of_any_call[fresh]: 395 failed, 329 succeeded
tried: 15000 headers against the safetensors crate: 15000 accepted
692 passed, 357 warnings in 1317.05s (0:21:57)
"""


def test_every_file_with_long_tests_is_run() -> None:
    tests = (REPOSITORY / "tests" / "python").glob("test_*.py")
    own = Path(__file__).name
    marked = {
        test.stem.removeprefix("test_")
        for test in tests
        if test.name != own and re.search(r"mark\.campaign|\bFULL\b", test.read_text())
    }
    assert marked <= set(campaign.LONG)


def test_what_the_parts_print_becomes_rows() -> None:
    assert campaign.executions(FUZZED) == {
        "header_fuzz": ("header_fuzz for 60 min", "2833293 inputs"),
        "zip_fuzz": ("zip_fuzz for 1.5 min", "12 inputs"),
    }
    assert campaign.tried(TESTED) == [
        ("724 faults in test_an_error_of_any_call[fresh]", "395 failed, 329 succeeded"),
        ("15000 headers against the safetensors crate", "15000 accepted"),
        ("pytest", "692 passed, 357 warnings in 1317.05s (0:21:57)"),
    ]
    tried, took = campaign.orders("ORDERS 12\nORDERS 30\nCOMMIT a save: 1.2 s, 3 calls\n")
    assert tried[1] == "42 tried" and took == ("a save", "1.2 s, 3 calls")
    both = "== megatron-core 0.13.1\n2 passed in 1.2s\n== megatron-core 0.19.2\n3 passed in 1.5s\n"
    assert campaign.other_megatron(both) == [
        ("tests that meet Megatron Core, with 0.13.1", "2 passed in 1.2s"),
        ("tests that meet Megatron Core, with 0.19.2", "3 passed in 1.5s"),
    ]
    assert campaign.cpp("[  PASSED  ] 45 tests.\n[  PASSED  ] 1 test.\n")[0][1] == "46 passed"


def test_a_part_that_failed_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(campaign, "RECORDS", tmp_path / "records.json")
    monkeypatch.setattr(campaign, "PAGE", tmp_path / "page.md")
    campaign.keep("orders", campaign.orders("ORDERS 12\n"), good=False)
    page = (tmp_path / "page.md").read_text()
    assert "12 tried" in page and "| orders | FAILED |" in page
    assert "| faults | not run yet | |" in page
    rows = json.loads((tmp_path / "records.json").read_text())["orders"]["rows"]
    assert rows[-1] == ["orders", "FAILED"]
    # Of another part, on another day: what is known stays.
    campaign.keep("gcc11", [("C++ tests", "3 passed")], good=True)
    page = (tmp_path / "page.md").read_text()
    assert "12 tried" in page and "3 passed" in page


def test_a_fuzz_target_fails_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(campaign, "RECORDS", tmp_path / "records.json")
    monkeypatch.setattr(campaign, "PAGE", tmp_path / "page.md")
    said = FUZZED.replace("zip_fuzz", "short_header_fuzz") + "dev: failed: short_header_fuzz\n"
    monkeypatch.setattr(campaign, "run", lambda part, command: (said, False))
    assert not campaign.fuzz(1, ["header_fuzz", "short_header_fuzz", "pickle_fuzz"])
    page = (tmp_path / "page.md").read_text()
    assert "| header_fuzz | FAILED |" not in page
    assert "| short_header_fuzz | FAILED |" in page
    # One that is not built, or ended without its figures.
    assert "| pickle_fuzz | FAILED |" in page


def test_every_fuzz_target_is_known_and_on_the_page() -> None:
    files = {file.stem for file in (REPOSITORY / "tests/fuzz").glob("*_fuzz.cc")}
    assert files == set(campaign.targets())
    page = campaign.PAGE.read_text()
    assert [name for name in files if f"| {name} for " not in page] == []
    assert page == campaign.page(campaign.recorded())


def test_optional_packages_are_pinned_and_have_tests() -> None:
    names = {
        group: [each.partition("==")[0] for each in of.packages()]
        for group, of in optional.GROUPS.items()
    }
    assert names == {
        "optional": ["torchao", "optimum-quanto"],
        "frameworks": ["torchtitan", "nemo_automodel"],
    }
    for group, of in optional.GROUPS.items():
        tests = "".join((REPOSITORY / file).read_text() for file in of.tests)
        assert all(f'"{name.replace("-", ".")}' in tests for name in names[group])
        _, rows = campaign.PARTS[group]
        (row,) = rows("14 passed in 5.73s\n")
        assert row[1] == "14 passed in 5.73s" and all(each in row[0] for each in of.packages())


def test_an_environment_beside_this_one_has_what_this_has(tmp_path: Path) -> None:
    """And no other torch: what is installed into it comes first, and brings nothing along."""
    inside = optional.beside(tmp_path / "made", [sysconfig.get_path("purelib")])
    code = "import importlib.util as u, sys; print(sys.prefix, u.find_spec('torch').origin)"
    prefix, torch = environments.said(inside, code).split()
    here = environments.said(Path(sys.executable), code).split()
    assert prefix == str(tmp_path / "made") != here[0] and torch == here[1]
