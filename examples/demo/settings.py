"""The numbers of the demo in one place; every process reads them from one file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the model, of the training run and of the comparison.

    ``global_batch`` sequences make one step, whatever the number of processes; it must divide by
    both world sizes. ``world_before`` processes train until one is lost, ``world_after`` go on, and
    ``world_again`` load what these have saved. ``kill_at`` is the first save (a multiple of
    ``save_every``) that may be interrupted.
    """

    hidden_size: int = 384
    intermediate_size: int = 1024
    layers: int = 4
    heads: int = 6
    vocabulary: int = 257
    sequence_length: int = 128
    global_batch: int = 4
    steps: int = 80
    save_every: int = 10
    kill_at: int = 50
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    seed: int = 2026
    world_before: int = 4
    world_after: int = 2
    world_again: int = 3
    speed_rounds: int = 5
    generated_tokens: int = 160
    # Largest relative difference of a loss allowed after the resume; docs/demo.md says why it
    # is not zero.
    first_loss_tolerance: float = 1e-5
    loss_tolerance: float = 1e-4

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


FULL = Settings()

# The same path through the code in under a minute; for the tests.
QUICK = Settings(
    hidden_size=128,
    intermediate_size=344,
    layers=2,
    heads=4,
    sequence_length=32,
    steps=18,
    save_every=3,
    kill_at=6,
    speed_rounds=1,
    generated_tokens=8,
)
