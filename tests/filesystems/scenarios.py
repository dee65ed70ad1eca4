"""All that is tried; each file enters its scenarios in trial.SCENARIOS."""

from __future__ import annotations

from . import kills, outages, races  # noqa: F401
from .trial import SCENARIOS

__all__ = ["SCENARIOS"]
