"""What all Python tests share."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlanner

from torch_ckpt.dcp import plan_cache


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in every order of tests."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_plans_of_earlier_tests() -> None:
    """Cached plans are kept for as long as the process lives, those of stock on the class."""
    plan_cache.forget()
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            value.clear()
