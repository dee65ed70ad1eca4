"""What is said of a step beside what is saved, and which step that makes the best. Nothing here
needs torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from torch_ckpt.checkpoint.checkpoint import Checkpoint, was_committed
from torch_ckpt.checkpoint.names import BEST
from torch_ckpt.errors import CheckpointError, InvalidArgumentError
from torch_ckpt.runs.place import child_name, newest_first, step_named, write_pointer

BestMode = Literal["min", "max"]
_STEP, _METRICS = "step", "metrics"


def step_metadata(
    step: int, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the manifest of a step says: `metadata`, the step, and its metrics. Raises
    InvalidArgumentError for metrics that are no numbers, and for names of `metadata` that these
    two have."""
    for name in (_STEP, _METRICS):
        if metadata is not None and name in metadata:
            raise InvalidArgumentError(f"metadata: the name {name!r} is what the directory says")
    said = {**(metadata or {}), _STEP: step}
    if metrics is None:
        return said
    return {**said, _METRICS: {name: _stored(name, value) for name, value in metrics.items()}}


def _stored(name: str, value: Any) -> int | float | str:
    """A number as JSON has it; "nan", "inf" and "-inf" are text."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # a tensor of several elements
        number = None
    if isinstance(number, int):  # bool too
        return int(number)
    if not isinstance(number, float):
        raise InvalidArgumentError(
            f"metrics: {name!r} is a {type(value).__name__} that is no single number"
        )
    return number if math.isfinite(number) else str(number)


def metrics_of(path: str) -> dict[str, float]:
    """The metrics of the checkpoint at `path`. Raises what looking at it does."""
    metrics = Checkpoint(path).metadata.get(_METRICS, {})
    if not isinstance(metrics, dict):
        return {}
    return {
        name: value if type(value) is int else float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf")
    }


class Best:
    """Which checkpoint in `root` is the best by a metric: BEST says it, and the metrics in each
    manifest prove it. On rank 0 alone; one thread at a time."""

    def __init__(self, root: str, metric: str, mode: BestMode) -> None:
        self._root = root
        self._metric = metric
        self._sign = 1 if mode == "min" else -1

    def check(self, metrics: Mapping[str, Any] | None) -> None:
        """Raise InvalidArgumentError where the metrics of a save lack the one that counts."""
        if metrics is not None and self._metric not in metrics:
            raise InvalidArgumentError(f"metrics lacks {self._metric!r}, which says what is best")

    def committed(self, step: int) -> None:
        """`step` is committed: BEST names it from now on, if it is better than what BEST names."""
        named = step_named(self._root, BEST)
        cost, least = self._cost(step), None if named is None else self._cost(named)
        if named is None and cost is None:
            return
        if named == step or least is None:
            best = self.find()
        elif cost is not None and cost < least:
            best = step
        else:
            return
        if best != named:
            write_pointer(self._root, BEST, best)

    def find(self) -> int | None:
        """The best of all that are there, the lowest of equal ones."""
        costs = {step: self._cost(step) for step in newest_first(self._root)}
        found = [(cost, step) for step, cost in costs.items() if cost is not None]
        return min(found)[1] if found else None

    def _cost(self, step: int) -> float | None:
        """What is to be small; None where that is not said of the step, or is not finite, and where
        it is not there."""
        path = os.path.join(self._root, child_name(self._root, step))
        if not was_committed(path):
            return None
        try:
            value = metrics_of(path).get(self._metric)
        except (CheckpointError, OSError):
            return None  # damaged: who loads it hears of it
        return self._sign * value if value is not None and math.isfinite(value) else None
