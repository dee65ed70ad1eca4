"""What all Python tests share."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in every order of tests."""
    random.seed(0)
    torch.manual_seed(0)
