"""One checkpoint, other world sizes and meshes: every launch loads what the earlier ones saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.layouts import check, layouts, local_of, state, whole
from ranks.run import Context, cases, raised
from torch.distributed.checkpoint.storage import StorageWriter

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.native.opened import Listing

CASES, case = cases()

WORLDS = (4, 2, 3, 1)
# What is saved in each world: directory name to writer. Loads know the global shapes.
SAVED: dict[str, Callable[[Path], StorageWriter]] = {
    "sharded": lambda path: HuggingFaceStorageWriter(path, save_distributed=True),
    "consolidated": lambda path: HuggingFaceStorageWriter(
        path, save_distributed=True, enable_consolidation=True
    ),
    "final": lambda path: HuggingFaceStorageWriter(path, layout="final", max_shard_size="2KB"),
    "distcp": lambda path: dcp.FileSystemWriter(path, thread_count=2),
}


def directory(shared: Path, world: int, name: str) -> Path:
    return shared / f"reshard-{name}-of-{world}"


def earlier(context: Context) -> list[Path]:
    """Directories that launches of other world sizes have left."""
    worlds = [world for world in WORLDS if world != context.world]
    paths = [directory(context.shared, world, name) for world in worlds for name in SAVED]
    found = [path for path in paths if path.exists()]
    assert found or context.world == WORLDS[0], "the launches before this one left nothing"
    return found


@case
def save(context: Context) -> None:
    table = layouts(context.world)
    for name, writer in SAVED.items():
        path = directory(context.shared, context.world, name)
        for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
            source = {**state(table), "step": context.world}
            dcp.save(source, storage_writer=writer(path), planner=kind())


@case
def load_in_other_worlds(context: Context) -> None:
    # Not every launch has predecessors: the first one has none.
    for path in earlier(context):
        table = layouts(context.world)
        for kind in (dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner):
            target: dict[str, Any] = {**state(table, blank=True), "step": 0}
            reader = HuggingFaceStorageReader(path, thread_count=3)
            dcp.load(target, storage_reader=reader, planner=kind())
            check(target, table)
            assert f"-of-{target['step']}" in path.name


@case
def load_into_other_dtypes_and_strides(context: Context) -> None:
    """Each rank's target is a plain tensor that is not contiguous, of a wider dtype."""
    for path in earlier(context):
        shapes = {name: layout.shape for name, layout in layouts(context.world).items()}
        target = {
            name: torch.full(shape[::-1], -1.0, dtype=torch.float64).permute(
                tuple(reversed(range(len(shape))))
            )
            for name, shape in shapes.items()
        }
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        for name, shape in shapes.items():
            assert torch.equal(target[name], whole(name, shape).double()), name


@case
def stock_reader_in_other_worlds(context: Context) -> None:
    for path in earlier(context):
        if any(path.glob("sharded")) or any(path.glob("*.distcp")):
            continue
        table = layouts(context.world)
        target = state(table, blank=True)
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        check(target, table)


@case
def only_a_part_is_read(context: Context) -> None:
    """A rank that wants a few rows of a large tensor reads little more than these rows."""
    for path in earlier(context):
        if not path.name.startswith(("reshard-sharded", "reshard-distcp")):
            continue
        before = read_bytes()
        table = {"large": layouts(context.world)["large"]}
        target = state(table, blank=True)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path, verify=False))
        read = read_bytes() - before
        local = local_of("large", table["large"])
        assert torch.equal(target["large"].to_local(), local)
        dist.barrier()
        wanted = local.numel() * 4
        # Beside it: the manifest, the catalog, ends of archives, and what direct I/O rounds to.
        assert read < wanted + (256 << 10), (path, read, wanted)


class _LateReader(HuggingFaceStorageReader):
    """On rank 1 it sees an older save, the first `late` times."""

    late = 0

    def _list(self) -> Listing:
        listing = super()._list()
        if dist.get_rank() == 1 and self.late > 0:
            return dataclasses.replace(listing, save_id="0" * 32)
        return listing

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.late -= 1


@case
def ranks_that_see_two_saves_do_not_mix_them(context: Context) -> None:
    if context.world == 1:
        return
    path = context.folder / "c"
    torch_ckpt.save({"w": torch.arange(8.0)}, checkpoint_id=path)
    reader = _LateReader(path)
    reader.late = 99
    target = {"w": torch.zeros(8)}
    raised(lambda: dcp.load(target, storage_reader=reader), "rank 1 sees 0000", "being replaced")
    assert not target["w"].any()
    # Ours looks again: a network file system shows it some seconds later.
    reader.late = 3
    torch_ckpt.load(target, checkpoint_id=path, storage_reader=reader)
    assert torch.equal(target["w"], torch.arange(8.0)) and reader.late == 0


def read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError("no rchar")
