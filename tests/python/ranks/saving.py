"""Saves by several ranks: modes, groups, cached plans, consolidation by all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.layouts import Layout, check, dtensor, layouts, state, whole
from ranks.run import Context, cases, raised
from safetensors.torch import load_file
from sample_states import assert_same, blank, listing, load_ours, load_stock
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

CASES, case = cases()


PLAIN = {"a": (5, 3), "b": (17,), "c": (2, 2, 2), "d": (), "e": (64, 64)}


def plain() -> dict[str, torch.Tensor]:
    return {name: whole(name, shape) for name, shape in PLAIN.items()}


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the final files, none of them twice, just as the index says."""
    found: dict[str, torch.Tensor] = {}
    weight_map = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(file)
        assert not set(tensors) & set(found)
        found.update(tensors)
        weight_map.update(dict.fromkeys(tensors, file.name))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == weight_map
    sizes = [tensor.numel() * tensor.itemsize for tensor in found.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    return found


@case
def full_state_dict_of_rank_0(context: Context) -> None:
    source = {**plain(), "step": 3} if context.rank == 0 else {}
    for number, options in enumerate(
        [
            {},
            {"fqn_to_index_mapping": {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3}, "thread_count": 3},
            {"save_distributed": True},
            {"save_distributed": True, "enable_consolidation": True},
        ]
    ):
        path = context.folder / str(number)
        dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, **options))
        if context.rank == 0:
            assert_same(load_ours(path, source), source)
            assert_same(load_stock(path, plain()), plain())
            if number != 2:
                assert_same(final_tensors(path), plain())
                files = len(list(path.glob("model-*.safetensors")))
                assert files == (3 if number == 1 else 1)
        dist.barrier()
        target = blank({**plain(), "step": 3})
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert_same(target, {**plain(), "step": 3})


@case
def plain_tensors_on_all_ranks_make_whole_final_files(context: Context) -> None:
    for number, mapping in enumerate([None, {"a": 1, "b": 2, "c": 1, "d": 2, "e": 2}]):
        for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
            path = context.folder / f"{number}-{kind.__module__}"
            mesh = DeviceMesh("cpu", list(range(context.world)))
            source = plain()
            source["b"] = DTensor.from_local(source["b"], mesh, [Replicate()])
            dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, mapping), planner=kind())
            if context.rank == 0:
                count = 2 if mapping else 1
                assert listing(path) == [
                    *(f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)),
                    "model.safetensors.index.json",
                    "torch_ckpt.catalog",
                    "torch_ckpt.json",
                ]
                assert_same(final_tensors(path), plain())
                assert_same(load_stock(path, plain()), plain())
            dist.barrier()
            target = blank(plain())
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
            assert_same(target, plain())


@case
def shards_make_whole_final_files(context: Context) -> None:
    """As stock's writer is made by default; it writes a shard alone into a final file."""
    table = {"w": Layout((2 * context.world, 3), (context.world,), (Shard(0),))}
    path = context.folder / "c"
    dcp.save(state(table), storage_writer=HuggingFaceStorageWriter(path))
    assert_same(final_tensors(path), {"w": whole("w", table["w"].shape)})


@case
def every_rank_its_own_names(context: Context) -> None:
    """Pipeline stages: other keys on every rank."""
    mine = {f"stage{context.rank}": {"w": whole(f"s{context.rank}", (4, 3)), "n": context.rank}}
    all_of = {f"stage{r}": {"w": whole(f"s{r}", (4, 3)), "n": r} for r in range(context.world)}
    for number, options in enumerate([{}, {"save_distributed": True}]):
        path = context.folder / str(number)
        dcp.save(mine, storage_writer=HuggingFaceStorageWriter(path, **options))
        target = blank(mine)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert_same(target, mine)
        target = blank(all_of)
        torch_ckpt.load(target, checkpoint_id=path)
        assert_same(target, all_of)


@case
def cached_plans(context: Context) -> None:
    """A rank whose plan is cached writes by the plan of an earlier save, into the new directory."""
    for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
        table = layouts(context.world)
        writer = HuggingFaceStorageWriter(context.folder / "unused", save_distributed=True)
        name = kind.__module__.replace(".", "-")
        for number in range(5):
            source: dict[str, Any] = dict(state(table))
            source["plain"] = torch.full((3,), float(number))
            source["step"] = number
            if number >= 3 and context.rank == 1:
                source["late"] = torch.full((2,), float(number))  # only this rank's plan changes
            path = context.folder / f"{name}-{number}"
            planner = kind(enable_plan_caching=True)
            dcp.save(source, storage_writer=writer, planner=planner, checkpoint_id=path)
            target: dict[str, Any] = dict(state(table, blank=True))
            target.update(plain=torch.zeros(3), step=-1)
            if number >= 3:
                target["late"] = torch.zeros(2)
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
            check(target, table)
            assert target["step"] == number
            assert torch.equal(target["plain"], torch.full((3,), float(number)))
            if number >= 3:
                assert torch.equal(target["late"], torch.full((2,), float(number)))


@case
def cached_plans_of_other_groups(context: Context) -> None:
    """What all ranks share is whole in every save, whoever saves."""
    source = {name: whole(name, (5,)) for name in ("a", "b", "c")} | {"step": 3}
    alone = [dist.new_group([rank]) for rank in range(context.world)][context.rank]
    pairs = [dist.new_group([0, rank]) for rank in range(1, context.world)]

    def saved(name: str, **options: Any) -> None:
        planner = torch_ckpt.SavePlanner(enable_plan_caching=True)
        path = context.folder / name
        torch_ckpt.save(source, checkpoint_id=path, planner=planner, **options)
        target = blank(source)
        torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
        assert_same(target, source)

    for number in range(2):
        saved(f"all{number}")
        saved(f"alone{number}-{context.rank}", process_group=alone)
        for other, pair in enumerate(pairs, start=1):
            if context.rank in (0, other):
                saved(f"pair{number}-{other}", process_group=pair)
        saved(f"no_dist{number}-{context.rank}", no_dist=True)
        dist.barrier()


@case
def groups_without_global_rank_0(context: Context) -> None:
    ranks = list(range(1, context.world))
    group = dist.new_group(ranks)
    path = context.folder / "c"
    if context.rank in ranks:
        source = {f"w{context.rank}": whole(f"w{context.rank}", (3,)), "all": whole("all", (9,))}
        for number in range(2):
            source["step"] = number
            writer = HuggingFaceStorageWriter(
                path, save_distributed=True, enable_consolidation=True
            )
            dcp.save(source, storage_writer=writer, process_group=group)
        target = blank(source)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), process_group=group)
        assert_same(target, source)
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            path / "sharded", context.folder / "out", None, process_group=group
        )
    dist.barrier()
    if context.rank == 0:
        assert set(load_file(next((context.folder / "out").glob("model-*.safetensors")))) == {
            "all",
            *(f"w{rank}" for rank in ranks),
        }


@case
def sub_mesh(context: Context) -> None:
    """A DTensor on some of the ranks; the others take part without items."""
    ranks = [rank for rank in range(context.world) if rank % 2]
    mesh = DeviceMesh("cpu", ranks)
    content = whole("sub", (6, 2))

    def make(source: torch.Tensor) -> DTensor:
        if context.rank in ranks:
            local = source.chunk(len(ranks))[ranks.index(context.rank)].clone()
        else:
            local = torch.empty(0, 2)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=source.shape, stride=source.stride()
        )

    for kinds in ((None, None), (torch_ckpt.SavePlanner(), torch_ckpt.LoadPlanner())):
        path = context.folder / str(kinds[0] is None)
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(
            {"sub": make(content), "p": torch.ones(2)}, storage_writer=writer, planner=kinds[0]
        )
        target = {"sub": make(torch.zeros(6, 2)), "p": torch.zeros(2)}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=kinds[1])
        if context.rank in ranks:
            part = content.chunk(len(ranks))[ranks.index(context.rank)]
            assert torch.equal(target["sub"].to_local(), part)
        assert torch.equal(target["p"], torch.ones(2))


@case
def sharded_tensors_with_two_shards_on_a_rank(context: Context) -> None:
    rows = 4 * context.world
    content = whole("sharded", (rows, 3))

    def make(source: torch.Tensor) -> Any:
        # The rank's two boxes are far apart, so that they cannot be merged.
        starts = (2 * context.rank, rows // 2 + 2 * context.rank)
        parts = [
            LocalShard.from_tensor_and_offsets(source[at : at + 2].clone(), [at, 0], context.rank)
            for at in starts
        ]
        return init_from_local_shards(parts, rows, 3)

    for number, kinds in enumerate(
        ((None, None), (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner))
    ):
        for consolidate in (False, True):
            path = context.folder / f"{number}-{consolidate}"
            writer = HuggingFaceStorageWriter(
                path, save_distributed=True, enable_consolidation=consolidate
            )
            planner = kinds[0] and kinds[0]()
            dcp.save({"w": make(content)}, storage_writer=writer, planner=planner)
            target = make(torch.zeros(rows, 3))
            planner = kinds[1] and kinds[1]()
            reader = HuggingFaceStorageReader(path)
            dcp.load({"w": target}, storage_reader=reader, planner=planner)
            for got, wanted in zip(
                target.local_shards(), make(content).local_shards(), strict=True
            ):
                assert torch.equal(got.tensor, wanted.tensor)
            stock = {"w": torch.zeros(rows, 3)}
            stocks = dcp.HuggingFaceStorageReader(str(path))
            if consolidate or context.world == 1:  # where the two make the whole
                dcp.load(stock, storage_reader=stocks)
                assert torch.equal(stock["w"], content)
            else:  # packed: stock, which knows no such thing, says so
                raised(lambda: dcp.load(stock, storage_reader=stocks), "w")  # noqa: B023


@case
def fewer_ranks_save_into_the_same_directory(context: Context) -> None:
    path = context.folder / "c"
    if context.rank == 0:
        path.mkdir()
        (path / "config.json").write_text("{}")
    dist.barrier()
    rows = 2 * context.world
    table = {"w": Layout((rows, 2), (context.world,), (Shard(0),))}
    torch_ckpt.save(state(table), checkpoint_id=path)
    new = torch.full((rows, 2), 9.0)
    if context.rank == 0:
        assert len(list(path.glob("shard-*"))) == context.world
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        torch_ckpt.save({"w": new}, storage_writer=writer, no_dist=True)
        assert len(list(path.glob("shard-*"))) == 1
        assert (path / "config.json").exists()
    dist.barrier()
    target = {"w": torch.zeros(rows, 2)}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], new)


@case
def one_writer_many_saves(context: Context) -> None:
    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    layout = Layout((8, 3), (context.world,), (Shard(0),))
    for number in range(4):
        source = {"w": dtensor("w", layout) * number, "step": number}
        dcp.save(source, storage_writer=writer)
        target = {"w": dtensor("w", layout, blank=True), "step": -1}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert torch.equal(target["w"].to_local(), source["w"].to_local())
        assert target["step"] == number
        dist.barrier()
