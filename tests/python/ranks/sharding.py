"""Saving and loading DTensors of every layout, in every mode of the writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks.layouts import (
    DEVICE,
    check,
    layouts,
    mesh_of,
    odd_nesting,
    several_boxes,
    state,
    whole,
)
from ranks.run import Context, cases, everywhere, raised, stock_load_says
from safetensors.torch import load_file
from sample_states import STOCK_213, listing
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

CASES, case = cases()


def mapping(table: dict[str, Any]) -> dict[str, int]:
    return {name: 1 + number % 3 for number, name in enumerate(table)}


def files_hold(folder: Path, table: dict[str, Any], files: int) -> None:
    """The final files in `folder` hold every whole tensor."""
    found: dict[str, torch.Tensor] = {}
    names = sorted(file.name for file in folder.glob("model-*.safetensors"))
    assert names == [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)], names
    for name in names:
        found.update(load_file(folder / name))
    assert set(found) == set(table), set(found) ^ set(table)
    for name, layout in table.items():
        assert torch.equal(found[name], whole(name, layout.shape)), name


def through(context: Context, *, ours: bool, reader: Any = None, **options: Any) -> None:
    table = layouts(context.world)
    if ours:
        table = {**table, **several_boxes(context.world)}
    if options.pop("mapped", False):
        options["fqn_to_index_mapping"] = mapping(table)
    path = context.folder / "checkpoint"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, **options)
    save_planner = torch_ckpt.SavePlanner() if ours else None
    dcp.save(state(table), storage_writer=writer, planner=save_planner)
    target = state(table, blank=True)
    load_planner = torch_ckpt.LoadPlanner() if ours else None
    dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=load_planner)
    check(target, table)
    if options.get("enable_consolidation"):
        if context.rank == 0:
            files_hold(path, table, 3 if options.get("fqn_to_index_mapping") else 1)
        shards = path / "sharded"
        target = state(table, blank=True)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(shards), planner=load_planner)
        check(target, table)
    # Stock reads what we write, where its planner knows the layout.
    if not ours:
        target = state(table, blank=True)
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        check(target, table)


@case
def stock_writes_and_ours_reads(context: Context) -> None:
    table = layouts(context.world)
    for number, options in enumerate(
        [{}, {"fqn_to_index_mapping": mapping(table)}, {"enable_consolidation": True}]
    ):
        path = context.folder / str(number)
        if "enable_consolidation" in options:
            table.pop("scalar")  # stock's consolidation loses what it is
        writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, **options)
        dcp.save(state(table), storage_writer=writer)
        for kind in (dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner):
            target = state(table, blank=True)
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=kind())
            check(target, table)


@case
def stock_planner(context: Context) -> None:
    through(context, ours=False)


@case
def stock_planner_mapping(context: Context) -> None:
    through(context, ours=False, mapped=True)


@case
def stock_planner_consolidation(context: Context) -> None:
    through(context, ours=False, enable_consolidation=True)


@case
def our_planner(context: Context) -> None:
    through(context, ours=True)


@case
def our_planner_mapping_consolidation(context: Context) -> None:
    through(context, ours=True, mapped=True, enable_consolidation=True, thread_count=2)


@case
def save_and_load(context: Context) -> None:
    """The calls of ours, without a writer or a reader."""
    table = {**layouts(context.world), **several_boxes(context.world)}
    torch_ckpt.save(state(table), checkpoint_id=context.folder / "c")
    target = state(table, blank=True)
    torch_ckpt.load(target, checkpoint_id=context.folder / "c")
    check(target, table)


@case
def stock_planner_is_never_wrong_in_silence(context: Context) -> None:
    """What stock's planner cannot say is refused by name, or comes back right."""
    table = {**several_boxes(context.world), **odd_nesting(context.world)}
    for name, layout in table.items():
        path = context.folder / name
        one = {name: layout}
        source = state(one)
        try:
            dcp.save(
                source,
                storage_writer=HuggingFaceStorageWriter(path, save_distributed=True),
            )
            refused = ""
        except BaseException as error:
            refused = str(error)
        # Older releases of stock only log the name.
        assert not refused or name in refused or not STOCK_213, refused
        assert len(set(everywhere(bool(refused)))) == 1
        if refused:
            assert not [entry for entry in listing(path) if "shard" in entry]
            continue
        for kind in (torch_ckpt.LoadPlanner, dcp.DefaultLoadPlanner):
            target = state(one, blank=True)
            refused = ""
            try:
                dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=kind())
            except BaseException as error:
                refused = str(error)
            assert not any(everywhere(refused)) or (
                f"'{name}'" in refused and "Use torch" in refused
            )
            if not refused:
                check(target, one)


@case
def odd_nesting_with_our_planner(context: Context) -> None:
    table = odd_nesting(context.world)
    torch_ckpt.save(state(table), checkpoint_id=context.folder / "c")
    target = state(table, blank=True)
    torch_ckpt.load(target, checkpoint_id=context.folder / "c")
    check(target, table)


@case
def several_boxes_are_not_loaded_below_the_stock_planner(context: Context) -> None:
    table = several_boxes(context.world)
    torch_ckpt.save(state(table), checkpoint_id=context.folder / "saved")
    raised(
        lambda: dcp.load(
            state(table, blank=True),
            storage_reader=HuggingFaceStorageReader(context.folder / "saved"),
        ),
        "'strided'",
        "torch_ckpt.LoadPlanner",
    )
    # Into whole tensors even stock's planner is right; its reader knows no packed boxes.
    path = context.folder / "saved"
    target = {name: torch.zeros(layout.shape) for name, layout in table.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
    for name, layout in table.items():
        assert torch.equal(target[name], whole(name, layout.shape)), name
    raised(
        lambda: dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path))),
        stock_load_says("strided"),
    )


@case
def into_whole_tensors(context: Context) -> None:
    table = {**layouts(context.world), **several_boxes(context.world)}
    path = context.folder / "c"
    torch_ckpt.save(state(table), checkpoint_id=path)
    for planner in (None, torch_ckpt.LoadPlanner()):
        target = {name: torch.full(layout.shape, -1.0) for name, layout in table.items()}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=planner)
        for name, layout in table.items():
            assert torch.equal(target[name], whole(name, layout.shape)), name


def replicas(world: int, add: float) -> dict[str, Any]:
    """2 MiB for each rank in each tensor, which all ranks have, or half of them."""
    value = (whole("replica", (500 * world, 1024)) + add).to(DEVICE)
    halves = [Replicate(), Shard(0)]
    return {
        "rows": value,
        "columns": value.clone().t(),
        "prepended": value.clone().view(1, 1, *value.shape),
        "halves": distribute_tensor(value, mesh_of((2, world // 2)), halves, src_data_rank=None),
        "step": torch.tensor(add),
    }


@case
def large_replicas_are_written_by_all(context: Context) -> None:
    """In rows: no rank has much more to write than another."""
    world = context.world
    assert world % 2 == 0
    modes: list[dict[str, Any]] = [
        {"save_distributed": True},
        {"layout": "final"},
        {"save_distributed": True, "enable_consolidation": True},
    ]
    for number, options in enumerate(modes):
        path = context.folder / str(number)
        for add in (0.0, 1.0):  # the second time by plans that are kept
            planner = torch_ckpt.SavePlanner(enable_plan_caching=True)
            writer = HuggingFaceStorageWriter(path, overwrite="all", **options)
            torch_ckpt.save(replicas(world, add), storage_writer=writer, planner=planner)
        shards = path / "sharded" if "enable_consolidation" in options else path
        sizes = [file.stat().st_size for file in shards.glob("shard-*.safetensors")]
        if "layout" not in options:
            assert len(sizes) == world and max(sizes) - min(sizes) < 1.2 * (1 << 20), sizes
        wanted = replicas(world, 1.0)
        for reader in (HuggingFaceStorageReader(path), dcp.HuggingFaceStorageReader(str(path))):
            target = {name: torch.full_like(value, -5.0) for name, value in wanted.items()}
            dcp.load(target, storage_reader=reader)
            for name, value in wanted.items():
                assert torch.equal(full(target[name]), full(value)), name


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@case
def every_dtype(context: Context) -> None:
    """Shards of every dtype that collectives of this test need not know."""
    from sample_states import DTYPES, bits, sample

    mesh = mesh_of((context.world,))
    wholes = {str(dtype): sample(dtype, 2 * context.world, 5) for dtype in DTYPES}

    def make(source: torch.Tensor) -> DTensor:
        local = source[2 * context.rank : 2 * context.rank + 2].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save({name: make(value) for name, value in wholes.items()}, storage_writer=writer)
    for folder in (path, path / "sharded"):
        target = {
            name: make(torch.zeros(value.shape, dtype=torch.uint8).to(value.dtype))
            for name, value in wholes.items()
        }
        dcp.load(target, storage_reader=HuggingFaceStorageReader(folder))
        for name, value in wholes.items():
            assert bits(target[name].to_local()) == bits(make(value).to_local()), name
