"""Asynchronous saves by several ranks: what is staged is saved, whatever the trainer does then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from ranks.layouts import check, layouts, several_boxes, state
from ranks.run import Context, cases
from ranks.saving import FailsOnRank1
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_ckpt
from torch_ckpt import PinnedMemoryStager, _core

CASES, case = cases()

BLOCKING = StagingOptions(False, False, False, False)


def leased() -> int:
    stats: dict[str, int] = _core.call({"op": "arena", "staging": True})
    return stats["leased"]


@case
def in_threads(context: Context) -> None:
    table = layouts(context.world)
    path = context.folder / "c"
    for number in range(2):
        source = {**state(table), "step": number}
        future = torch_ckpt.async_save(source, checkpoint_id=path)
        future.result()
        target: dict[str, Any] = {**state(table, blank=True), "step": -1}
        torch_ckpt.load(target, checkpoint_id=path)
        check(target, table)
        assert target["step"] == number
        dist.barrier()
    future = torch_ckpt.async_save(source, checkpoint_id=path, planner=FailsOnRank1())
    error = future.exception()
    assert "rank 1" in str(error), error
    assert leased() == 0
    future = torch_ckpt.async_save(source, checkpoint_id=path)
    future.result()
    assert leased() == 0


@case
def changes_after_return(context: Context) -> None:
    """Two saves at a time, each in a process group of its own; every tensor changes as soon as the
    trainer may do so."""
    table = {**layouts(context.world), **several_boxes(context.world)}
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    stagers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: PinnedMemoryStager(BLOCKING),
        lambda: PinnedMemoryStager(prepare="2MiB"),
    ]
    uploads: list[Future[Any]] = []
    for number in range(6):
        source: dict[str, Any] = {**state(table), "groups": [{"lr": number}]}
        answer: Any = torch_ckpt.async_save(
            source,
            checkpoint_id=context.folder / str(number),
            process_group=groups[number % 2],
            async_stager=stagers[number % 3](),
        )
        if not isinstance(answer, Future):
            answer.staging_completion.result()
            answer = answer.upload_completion
        for name in table:
            source[name].to_local().fill_(-1)
        source["groups"][0]["lr"] = -1
        uploads.append(answer)
        if number > 0:
            uploads[number - 1].result()
    uploads[-1].result()
    assert leased() == 0
    dist.barrier()
    for number in range(6):
        target: dict[str, Any] = {**state(table, blank=True), "groups": [{"lr": -2}]}
        torch_ckpt.load(target, checkpoint_id=context.folder / str(number))
        check(target, table)
        assert target["groups"] == [{"lr": number}]


@case
def local_tensors_inside_a_storage(context: Context) -> None:
    """Stock's stagers clone such storages whole, or fail (torch 2.13)."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (context.world,))
    storage = torch.arange(3000.0).view(100, 30)
    parts = {
        "rows": (storage[10:14], Shard(0)),
        "columns": (storage[:6, 3:9], Shard(0)),
        "transposed": (storage[50:54].t(), Replicate()),
    }
    source = {
        name: DTensor.from_local(local, mesh, [placement], run_check=False)
        for name, (local, placement) in parts.items()
    }
    wanted = {name: local.clone() for name, (local, _) in parts.items()}
    upload = torch_ckpt.async_save(source, checkpoint_id=context.folder / "c")
    storage.zero_()
    upload.result()
    target = {
        name: DTensor.from_local(torch.zeros_like(local), mesh, [placement], run_check=False)
        for name, (local, placement) in parts.items()
    }
    torch_ckpt.load(target, checkpoint_id=context.folder / "c")
    for name, local in wanted.items():
        assert torch.equal(target[name].to_local(), local), name
