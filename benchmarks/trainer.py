"""A trainer to save beside: steps of arithmetic, and what a save does to them."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

THREADS = 2
WIDTH = 512
STEP_SECONDS = 0.005
UNDISTURBED_STEPS = 60


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a step takes while nothing is saved."""

    seconds: float
    """The median."""
    cpu_seconds: float


class Trainer:
    """Steps of about 5 ms: matrix products by two threads, as a model that trains on the CPU."""

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        self._left, self._right = torch.randn(2, WIDTH, WIDTH)
        self._out = torch.empty(WIDTH, WIDTH)
        self._products = 1
        for _ in range(20):  # the first ones start the threads
            self.step()
        one = statistics.median(self.step() for _ in range(20))
        self._products = max(1, round(STEP_SECONDS / one))

    def step(self) -> float:
        """One step; returns its seconds."""
        start = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
        return time.perf_counter() - start

    def undisturbed(self) -> Pace:
        """Takes steps while nothing is saved."""
        cpu = time.process_time()
        seconds = [self.step() for _ in range(UNDISTURBED_STEPS)]
        cpu = time.process_time() - cpu
        return Pace(statistics.median(seconds), cpu / UNDISTURBED_STEPS)
