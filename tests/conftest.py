"""What the tests of every folder share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# One kernel or two are compiled: no pool of processes that each import torch for it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Seconds: what is marked as slow may take longer than the bound of each test in pyproject.toml.
BOUNDS = {"campaign": 3600, "slow": 900}

# A worker runs all tests of a file. Those that take minutes begin first, or one of them is all that
# runs at the end.
LONG_FILES = (
    *("test_package", "test_ranks", "test_readme", "test_errors", "test_convert", "test_kills"),
    *("test_async_failures", "test_async_ends", "test_neighbours", "test_process_saves"),
    *("test_benchmarks", "test_stager", "test_parser_differential", "test_directory_kills"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        # With TORCH_CKPT_FULL (./dev campaign) any test may try 50 times as much.
        marks = [mark for mark in BOUNDS if item.get_closest_marker(mark)]
        marks = ["campaign"] if os.environ.get("TORCH_CKPT_FULL", "0") != "0" else marks
        if marks and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BOUNDS[marks[0]]))


PROBE = """
import sys, torch
import torch_ckpt
torch_ckpt.save({"w": torch.ones(1)}, checkpoint_id=sys.argv[1], no_dist=True)
"""


@pytest.fixture(scope="session")
def fault_points(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The library fails where TORCH_CKPT_FAULTS says so. A build that cannot is no build to test:
    what needs this fixture fails there, or is skipped where $TORCH_CKPT_TEST_WHEEL says that a
    wheel is tested, which users get without fault points."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path_factory.mktemp("probe") / "c")],
        # A misspelt fault makes every call fail.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TORCH_CKPT_FAULTS": "nonsense",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        if os.environ.get("TORCH_CKPT_TEST_WHEEL", "") not in ("", "0"):
            pytest.skip("a wheel is tested, which has no fault points")
        pytest.fail("this build has no fault points (-DTORCH_CKPT_FAULTS=ON)")
    assert "Invalid argument" in done.stderr, done.stderr
