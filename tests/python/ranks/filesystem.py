"""The whole product on one file system, by ranks that may be on several nodes: for
`./dev filesystems` (tests/filesystems), which launches torchrun on its nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks.final import check_final
from ranks.layouts import check, layouts, mesh_of, odd_nesting, several_boxes, state, whole
from ranks.run import Context, cases, everywhere
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import Checkpoint, CheckpointDirectory

CASES, case = cases()
LARGE_BYTES = 256 << 20
COLUMNS = (1 << 14, 64)  # 4 MiB in rows of 256 bytes


def table_of(context: Context) -> dict[str, Any]:
    return layouts(context.world) | several_boxes(context.world) | odd_nesting(context.world)


def content(context: Context, step: int) -> dict[str, Any]:
    return {**state(table_of(context)), "n": torch.full((5,), step), "step": step}


def load(context: Context, path: Path) -> int:
    """The step that was saved; the tensors must be right."""
    target = {**state(table_of(context), blank=True), "n": torch.zeros(5).long(), "step": -1}
    torch_ckpt.load(target, checkpoint_id=path)
    check(target, table_of(context))
    step = int(target["step"])
    assert bool((target["n"] == step).all()), "a mixture"
    return step


def total(metadata: Any, what: str) -> int:
    return sum(getattr(of_rank, what) for of_rank in metadata.storage_data.values())


def nodes_of_the_ranks() -> int:
    return len(set(everywhere(os.uname().nodename)))


def until_seen(true: Callable[[], bool]) -> None:
    """What rank 0 has removed, the caches of another node may show for some seconds."""
    end = time.monotonic() + 25
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


@case
def save_and_overwrite(context: Context) -> None:
    path = context.folder / "c"
    for step in (1, 2, 3):
        torch_ckpt.save(content(context, step), checkpoint_id=path)
        assert load(context, path) == step
    until_seen(lambda: not list(path.glob(".*")))


@case
def async_save(context: Context) -> None:
    path = context.folder / "c"
    for step in (1, 2):
        source = content(context, step)
        saved = torch_ckpt.async_save(source, checkpoint_id=path)
        for value in source.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        saved.result()
        assert load(context, path) == step


@case
def final_layout(context: Context) -> None:
    """Fresh, and over what was there."""
    path = context.folder / "c"
    for _ in range(2):
        torch_ckpt.save(state(table_of(context)), checkpoint_id=path, layout="final")
        check_final(path, table_of(context))
        dist.barrier()


@case
def rows_over_nodes(context: Context) -> None:
    """Bands: columns on a node, rows over the nodes; a ring on each node writes its rows."""
    mesh = mesh_of((2, context.world // 2))
    tensor = whole("grid", COLUMNS)
    source = {"w": distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])}
    metadata = torch_ckpt.save(source, checkpoint_id=context.folder / "c", layout="final")
    assert total(metadata, "ring_bytes") > tensor.nbytes // 4, metadata.storage_data
    check_columns(context, "grid")


@case
def columns_over_nodes(context: Context) -> None:
    """Assembling: columns that are on several nodes the coordinator gathers."""
    tensor = whole("columns", COLUMNS)
    source = {"w": distribute_tensor(tensor, mesh_of((context.world,)), [Shard(1)])}
    path = context.folder / "c"
    metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final")
    if nodes_of_the_ranks() > 1:
        assert total(metadata, "spill_bytes") >= tensor.nbytes, metadata.storage_data
    check_columns(context, "columns")


def check_columns(context: Context, name: str) -> None:
    loaded = {"w": torch.zeros(COLUMNS)}
    torch_ckpt.load(loaded, checkpoint_id=context.folder / "c")
    assert torch.equal(loaded["w"], whole(name, COLUMNS))


@case
def consolidation(context: Context) -> None:
    """Into a directory of its own, over it, and in place."""
    shards, path = context.folder / "shards", context.folder / "c"
    torch_ckpt.save(state(table_of(context)), checkpoint_id=shards)
    for target, overwrite in ((path, False), (path, True), (shards, False)):
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            shards, target, None, overwrite=overwrite
        )
        Checkpoint(target).verify()
        dist.barrier()
    check_final(path, table_of(context))


@case
def load_resharded(context: Context) -> None:
    """Every rank loads the whole of what all have saved."""
    path, table = context.folder / "c", table_of(context)
    torch_ckpt.save(state(table), checkpoint_id=path)
    loaded = {name: torch.zeros(layout.shape) for name, layout in table.items()}
    torch_ckpt.load(loaded, checkpoint_id=path)
    for name, layout in table.items():
        assert torch.equal(loaded[name], whole(name, layout.shape)), name


@case
def verify_on_every_rank(context: Context) -> None:
    path = context.folder / "c"
    torch_ckpt.save(content(context, 1), checkpoint_id=path)
    assert Checkpoint(path).is_committed()
    reports = everywhere(Checkpoint(path).verify())
    assert len(set(reports)) == 1, reports


@case
def directory_of_a_run(context: Context) -> None:
    directory = CheckpointDirectory(context.folder / "run", keep_last=2)
    for step in (1, 2, 3):
        directory.save(content(context, step), step)
        assert set(everywhere(directory.latest())) == {directory.path(step)}
    until_seen(lambda: not (context.folder / "run" / "step-1").exists())


@case
def speed(context: Context) -> None:
    """Of a large state: the second save, over the first one, and its load, which finds in memory
    what the file system has kept there. Seconds go to the file that the environment names."""
    path, rows = context.folder / "c", LARGE_BYTES // context.world // 4096
    mesh = mesh_of((context.world,))
    part = torch.full((rows, 1024), context.rank, dtype=torch.int32)
    source = {"w": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}
    target = {"w": DTensor.from_local(torch.zeros_like(part), mesh, [Shard(0)], run_check=False)}
    times: dict[str, float] = {}
    for what, call in (
        ("first save", lambda: torch_ckpt.save(source, checkpoint_id=path)),
        ("save", lambda: torch_ckpt.save(source, checkpoint_id=path)),
        ("load", lambda: torch_ckpt.load(target, checkpoint_id=path)),
    ):
        dist.barrier()
        begin = time.monotonic()
        call()
        dist.barrier()
        times[what] = time.monotonic() - begin
    assert torch.equal(target["w"].to_local(), part)
    if context.rank == 0:
        Path(os.environ["SPEED_FILE"]).write_text(json.dumps({"bytes": LARGE_BYTES, **times}))
