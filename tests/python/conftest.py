"""What all Python tests share."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import megatron_source
import pytest
import torch
import torch.distributed as dist
from async_writers import GatedWriter, memory
from hypothesis import HealthCheck, settings
from torch.distributed.checkpoint.planner import SavePlanner

from torch_ckpt.calls import futures
from torch_ckpt.dcp.plan import plan_cache
from torch_ckpt.native import core

# A busy machine may take any time for an example, and for making one.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=50 if os.environ.get("TORCH_CKPT_FULL", "") in ("", "0") else 100,
)
settings.load_profile("unhurried")
megatron_source.use()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TORCH_CKPT_FULL", "") in ("", "0"):
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: ./dev campaign runs it"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in every order of tests."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_plans_of_earlier_tests() -> None:
    """Cached plans are kept for as long as the process lives, those of stock on the class."""
    for plans in (plan_cache._ranks, plan_cache._global, plan_cache._unfinished):
        plans.clear()
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            value.clear()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # errors of other tests, with states in their tracebacks
    before = memory()["leased"]
    yield
    futures.close(20)
    assert memory()["leased"] == before
    core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed until the test opens it; GatedWriters wait for it before they write."""
    GatedWriter.gate = threading.Event()
    GatedWriter.writing = []
    yield GatedWriter.gate
    GatedWriter.gate.set()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
