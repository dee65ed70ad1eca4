"""Checkpoints of more ranks than a machine has room for: one process plays them all in turn, by
the calls that DCP makes of our writer, without process groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks import rivals


@dataclasses.dataclass(frozen=True)
class Box:
    """What a rank has of a tensor."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Box:
        """All of it."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


Part = Mapping[str, Box]


class _Planner(DefaultSavePlanner):
    """Finds the tensors of one rank's plan."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._part[index.fqn].tensor


def _items(part: Part) -> Iterator[WriteItem]:
    for name, box in part.items():
        offsets = torch.Size(box.offsets)
        yield WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, box.tensor.shape),
                properties=TensorProperties(dtype=box.tensor.dtype),
                size=torch.Size(box.shape),
            ),
        )


class SimulatedSave:
    """A sharded save of ``world`` ranks into ``path``, of which ``part(rank)`` are the tensors.

    Used for one save: ``write``, then ``commit``.
    """

    def __init__(self, path: Path, world: int, part: Callable[[int], Part]) -> None:
        self._path = path
        self._world = world
        self._part = part
        # All of them before the first plan, as DCP does: a writer ends what its thread left open.
        self._writers = [self._writer(rank) for rank in range(world)]
        self._results: list[Any] = []
        self._names: dict[str, TensorStorageMetadata] = {}

    def _writer(self, rank: int) -> Any:
        # Unsynced: what is built here is read from the page cache, or written back before it is.
        writer = rivals.ours("HuggingFaceStorageWriter")(
            str(self._path), save_distributed=True, sync_files=False
        )
        writer.set_up_storage_writer(rank == 0, rank=rank)
        return writer

    def write(self) -> None:
        """What the ranks do, and the coordinator before them."""
        # Plans without items, which would take gigabytes: a sharded save looks at none of them.
        plans = self._writers[0].prepare_global_plan([SavePlan([])] * self._world)
        for rank, writer in enumerate(self._writers):
            part = self._part(rank)
            plan = writer.prepare_local_plan(SavePlan(list(_items(part))))
            plan = dataclasses.replace(plans[rank], items=plan.items)
            self._results.append(writer.write_data(plan, _Planner(part)).wait())
            for name, box in part.items():
                if name not in self._names:
                    self._names[name] = TensorStorageMetadata(
                        TensorProperties(dtype=box.tensor.dtype), torch.Size(box.shape), []
                    )

    def commit(self) -> None:
        """What the coordinator does when all ranks have written."""
        self._writers[0].finish(Metadata(self._names), self._results)


def save_as_ranks(path: Path, world: int, part: Callable[[int], Part]) -> None:
    """The whole save."""
    save = SimulatedSave(path, world, part)
    save.write()
    save.commit()
