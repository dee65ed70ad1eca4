"""Asynchronous saves by several ranks: what is staged is saved, whatever the trainer does then."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.failures import FailsOnRank1
from ranks.layouts import check, layouts, several_boxes, state
from ranks.run import Context, cases, raised
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.native import core

CASES, case = cases()

BLOCKING = StagingOptions(False, False, False, False)


def leased() -> int:
    stats: dict[str, int] = core.call({"op": "arena", "snapshots": True})
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
        lambda: PinnedMemoryStager(StagingOptions(), prepare="2MiB"),
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
        if isinstance(answer, AsyncSaveResponse):
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


def random_state(context: Context, draw: random.Random, sign: int) -> dict[str, Any]:
    """The same on every rank, whose own values have `sign`."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (context.world,))
    state: dict[str, Any] = {}
    for number in range(draw.randint(1, 12)):
        shape = [draw.choice([0, 1, 2, 3, 7, 64, 1000]) for _ in range(draw.randint(0, 3))]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        seed = draw.randrange(1 << 30)
        value = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
        value = (value * sign if sign > 0 else torch.zeros_like(value)).to(dtype)
        kind = draw.choice(["plain", "strided", "tied", "shard", "replicate", "list", "nested"])
        if kind == "strided" and value.dim() > 1:
            value = value.transpose(0, -1)
        elif kind == "tied" and state:
            value = draw.choice(list(state.values()))
        elif kind in ("shard", "replicate"):
            placement: Any = Replicate()
            if kind == "shard" and value.dim() > 0:
                placement = Shard(draw.randrange(value.dim()))
            value = distribute_tensor(value, mesh, [placement])
        elif kind == "list":
            value = [value, number * sign]
        elif kind == "nested":
            value = {"deep": {"w": value, "n": number * sign}}
        state[f"t{number}"] = value
    return state


def change(value: Any) -> None:
    """Every tensor, whatever it is in."""
    if isinstance(value, DTensor):
        value.to_local().fill_(77)
    elif isinstance(value, torch.Tensor):
        value.fill_(77)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            change(inner)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor):
        return torch.equal(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@case
def random_states_change_after_return(context: Context) -> None:
    """Saves that overlap, of states of any layout; each is on disk as it was when it was staged."""

    group = dist.new_group(backend="gloo")  # distribute_tensor uses the other one meanwhile

    # Derandomized: every rank draws the same.
    @settings(max_examples=8, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4))
    def holds(seeds: list[int]) -> None:
        saves = []
        for number, seed in enumerate(seeds):
            state = random_state(context, random.Random(seed), 1)
            answer = torch_ckpt.async_save(
                state,
                checkpoint_id=context.folder / str(number),
                async_stager=[None, PinnedMemoryStager(StagingOptions())][number % 2],
                process_group=group,
                on_busy="overlap",
            )
            answer.staging_completion.result()
            change(state)
            saves.append(answer.upload_completion)
        for save in saves:
            save.result()
        for number, seed in enumerate(seeds):
            target = random_state(context, random.Random(seed), -1)
            torch_ckpt.load(target, checkpoint_id=context.folder / str(number))
            assert same(target, random_state(context, random.Random(seed), 1)), seed

    holds()


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


def weights(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "step": int(value)}


def check_saved(folder: Any, value: float) -> None:
    target = weights(-2.0)
    torch_ckpt.load(target, checkpoint_id=folder)
    assert (target["w"] == value).all() and target["step"] == value


@case
def a_state_that_one_rank_cannot_stage(context: Context) -> None:
    """The call raises there; the others hear of it from their futures, at once."""
    for stager in (None, PinnedMemoryStager(BLOCKING), PinnedMemoryStager(StagingOptions())):
        state = weights(1)
        if context.rank == 1:
            state["bad"] = torch.zeros(3, device="meta")
        error: Any = None
        began = time.monotonic()
        try:
            save = torch_ckpt.async_save(
                state, checkpoint_id=context.folder / "c", async_stager=stager
            )
            error = save.upload_completion.exception()
        except torch_ckpt.UnsupportedError as raised:
            assert context.rank == 1
            error = raised
        assert time.monotonic() - began < 60, "somebody waited for the group's timeout"
        text = str(error)
        assert "rank 1" in text and "'bad'" in text and "meta" in text, text
        assert not (context.folder / "c").exists()
        torch_ckpt.async_save(weights(2), checkpoint_id=context.folder / "d").result()
        check_saved(context.folder / "d", 2)


class EndsLate(torch_ckpt.HuggingFaceStorageWriter):
    """Its saves are over on rank 0 before they are on others."""

    def end_save(self) -> None:
        time.sleep(0 if dist.get_rank() == 0 else 0.3)
        super().end_save()


@case
def an_error_that_some_have_heard(context: Context) -> None:
    """Rank 0 says for all whether the next save begins."""
    for heard in ([0], [1], []):
        folder = context.folder / str(heard)
        save = torch_ckpt.async_save(
            weights(1), storage_writer=EndsLate(folder), planner=FailsOnRank1()
        )
        if context.rank in heard:
            assert "rank 1" in str(save.exception())
        if heard == [0]:
            if context.rank != 0:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    save = torch_ckpt.async_save(weights(2), checkpoint_id=folder)
                assert any("earlier save" in str(warning.message) for warning in said)
            else:
                save = torch_ckpt.async_save(weights(2), checkpoint_id=folder)
        else:
            error = raised(
                lambda: torch_ckpt.async_save(weights(2), checkpoint_id=folder),  # noqa: B023
                "earlier save",
                "rank 1",
            )
            assert isinstance(error, torch_ckpt.CheckpointError)
            save = torch_ckpt.async_save(weights(2), checkpoint_id=folder)
        save.result()
        check_saved(folder, 2)


class SlowWriter(torch_ckpt.HuggingFaceStorageWriter):
    """Rank 1 writes later than the others."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(0.3 if self.rank == 1 else 0.1)
        return super().write_data(plan, planner)


@case
def busy_is_what_rank_0_is(context: Context) -> None:
    group = dist.new_group(backend="gloo")  # this trainer uses its own meanwhile

    def save(number: int, **options: Any) -> Any:
        state = weights(number)
        writer = SlowWriter(context.folder / str(number), save_distributed=True)
        began = torch_ckpt.async_save(state, storage_writer=writer, process_group=group, **options)
        state["w"].fill_(-1)
        return began

    first = save(1)
    error = raised(lambda: save(2, on_busy="raise"), "another save is going on")
    assert isinstance(error, torch_ckpt.ConflictError)
    saves = [save(2)]
    assert first.done()
    for number in range(3, 6):  # in one process group, and still one after the other
        saves.append(save(number, on_busy="overlap"))
    assert not saves[-1].done()
    for began in saves:
        began.result()
    for number in range(1, 6):
        check_saved(context.folder / str(number), number)
    (phases,) = {tuple(sorted(began.result().storage_data)) for began in saves}
    assert phases == tuple(range(context.world))
    assert saves[0].stats.rank == context.rank
    assert (saves[0].stats.planned_s or 0) > (0.25 if context.rank == 1 else 0.05)


@case
def saves_and_loads_wait_for_it(context: Context) -> None:
    """All in one process group, whose collectives must not mix."""
    writer = SlowWriter(context.folder / "1", save_distributed=True)
    first = torch_ckpt.async_save(weights(1), storage_writer=writer)
    torch_ckpt.save(weights(2), checkpoint_id=context.folder / "2")
    assert first.done()
    writer = SlowWriter(context.folder / "3", save_distributed=True)
    third = torch_ckpt.async_save(weights(3), storage_writer=writer)
    check_saved(context.folder / "2", 2)
    assert third.done()
    check_saved(context.folder / "3", 3)
    directory = torch_ckpt.CheckpointDirectory(context.folder / "d", keep_last=1)
    for step in range(3):
        directory.async_save(weights(step), step)
    directory.close()
    dist.barrier()  # rank 0 has deleted the others
    assert directory.steps() == [2]
    check_saved(directory.latest(), 2)


@case
def parts_and_saves_of_one_rank(context: Context) -> None:
    state = weights(3)
    upload = torch_ckpt.async_save(
        state, checkpoint_id=context.folder / "parts", use_collectives=False
    )
    state["w"].fill_(-1)
    upload.result()
    dist.barrier()
    check_saved(context.folder / "parts", 3)
    own = context.folder / str(context.rank)
    state = weights(context.rank)
    upload = torch_ckpt.async_save(state, checkpoint_id=own, no_dist=True)
    state["w"].fill_(-1)
    upload.result()
    target = weights(-2)
    torch_ckpt.load(target, checkpoint_id=own, no_dist=True)
    assert (target["w"] == context.rank).all()


@case
def one_rank_has_no_memory(context: Context) -> None:
    """It streams, the others stage."""
    budget = "2MiB" if context.rank == 1 else "1GiB"
    stager = PinnedMemoryStager(BLOCKING, memory_budget=budget, over_budget="stream")
    state = {
        "w": torch.full((1 << 20,), float(context.rank)),
        "r": torch_ckpt.PerRank(context.rank),
    }
    mesh = dist.device_mesh.init_device_mesh("cpu", (context.world,))
    state["w"] = DTensor.from_local(state["w"], mesh, [Shard(0)], run_check=False)
    save = torch_ckpt.async_save(state, checkpoint_id=context.folder / "c", async_stager=stager)
    state["w"].to_local().fill_(-1)
    save.result()
    assert (save.stats.staged_bytes is None) == (context.rank == 1)
    torch_ckpt.load(state, checkpoint_id=context.folder / "c")
    assert (state["w"].to_local() == context.rank).all()
    core.call({"op": "arena", "snapshots": True, "budget": 1 << 62})
