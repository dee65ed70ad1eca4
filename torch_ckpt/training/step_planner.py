"""The planner of a load that makes its own target, of what a step has and a program wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.planning.reserved import STRUCTURE_FQN

Path = tuple[str | int, ...]


class Wants(Protocol):
    """What a program takes of a step."""

    def begin(self, leaves: Mapping[str, Path]) -> None:
        """Look at the names of all leaves and their paths; raises where what must be there is
        not."""

    def wants(self, fqn: str, path: Path) -> bool:
        """Whether a leaf is loaded."""

    def target(self, fqn: str, path: Path, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Where a tensor that is wanted is loaded."""

    def say(self) -> Any:
        """What rank 0 is to hear before anything is read."""

    def look(self, said: list[Any]) -> None:
        """On rank 0: what all ranks say. Raises for all."""


class StepPlanner(LoadPlanner):
    """Loads what `wants` wants, nested as it was saved, into an empty state dict."""

    def __init__(self, wants: Wants, *, rank: int, world_size: int) -> None:
        super().__init__(rebuild=True, rank=rank, world_size=world_size)
        self._wants = wants

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        saved = metadata.state_dict_metadata
        paths = metadata.planner_data or {}
        leaves = {fqn: tuple(paths.get(fqn, (fqn,))) for fqn in saved if fqn != STRUCTURE_FQN}
        self._wants.begin(leaves)
        wanted = {fqn: saved[fqn] for fqn, path in leaves.items() if self._wants.wants(fqn, path)}
        metadata = dataclasses.replace(metadata, state_dict_metadata=wanted)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def new_value(
        self, fqn: str, path: Path, saved: TensorStorageMetadata | BytesStorageMetadata
    ) -> Any:
        if isinstance(saved, BytesStorageMetadata):
            return None
        return self._wants.target(fqn, path, saved.properties.dtype, saved.size)

    def say(self, plan: Any) -> Any:
        return self._wants.say()

    def look(self, said: list[Any]) -> None:
        self._wants.look(said)
