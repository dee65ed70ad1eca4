"""Saves straight into final files, by every rank."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.layouts import check, layouts, mesh_of, odd_nesting, several_boxes, state, whole
from ranks.run import Context, cases, raised
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.dcp.node import Node

CASES, case = cases()


def final_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        of_file = load_file(file)
        assert not of_file.keys() & tensors.keys()
        tensors.update(of_file)
    return tensors


def check_final(path: Path, table: dict[str, Any]) -> None:
    """The directory holds every tensor of the table, whole, and matches its digests."""
    tensors = final_tensors(path)
    assert tensors.keys() == table.keys()
    for name, layout in table.items():
        assert torch.equal(tensors[name], whole(name, layout.shape)), name
    Checkpoint(path).verify()


@contextlib.contextmanager
def nodes(context: Context, count: int) -> Iterator[None]:
    """As if the ranks were on `count` nodes, for one save, in which nobody waits for a rank that
    does not come to its ring."""
    node = Node("boot", str(context.rank * count // context.world), 0)
    began = time.monotonic()
    with mock.patch("torch_ckpt.dcp.write.directory_save.this_node", return_value=node):
        yield
    assert time.monotonic() - began < 50, "somebody has waited for a minute"


@case
def every_layout(context: Context) -> None:
    for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
        table = layouts(context.world)
        if kind is torch_ckpt.SavePlanner:
            table |= several_boxes(context.world) | odd_nesting(context.world)
        path = context.folder / kind.__module__
        writer = HuggingFaceStorageWriter(path, layout="final")
        dcp.save(state(table), storage_writer=writer, planner=kind())
        check_final(path, table)
        table = layouts(context.world)
        for reader in (HuggingFaceStorageReader(path), dcp.HuggingFaceStorageReader(str(path))):
            target = state(table, blank=True)
            dcp.load(target, storage_reader=reader)
            check(target, table)
        dist.barrier()


@case
def into_several_files(context: Context) -> None:
    table = layouts(context.world)
    mapping = {name: 1 + number % 3 for number, name in enumerate(table)}
    for number, options in enumerate(
        (
            {"max_shard_size": "1KB"},
            {"max_shard_size": 500, "naming": "hf"},
            {"fqn_to_index_mapping": mapping},
            {"naming": "diffusers"},
        )
    ):
        path = context.folder / str(number)
        torch_ckpt.save(state(table), checkpoint_id=path, layout="final", **options)
        check_final(path, table)
        if "fqn_to_index_mapping" in options:
            for name, index in mapping.items():
                file = path / f"model-{index:05}-of-00003.safetensors"
                assert name in load_file(file)
        elif "max_shard_size" in options:
            assert len(list(path.glob("model-*.safetensors"))) > 3
        else:
            assert (path / "diffusion_pytorch_model.safetensors").exists()
        target = state(table, blank=True)
        torch_ckpt.load(target, checkpoint_id=path)
        check(target, table)
        dist.barrier()


@case
def replicas_in_order(context: Context) -> None:
    """Files are divided in the order of the state dict, whoever writes a replica."""
    if context.world % 2:
        return
    mesh = mesh_of((2, context.world // 2))
    source = {
        name: distribute_tensor(whole(name, (8, 16)), mesh, [Replicate(), Shard(0)])
        for name in ("d", "b", "e", "a", "f", "c")
    }
    ours = functools.partial(torch_ckpt.SavePlanner, enable_plan_caching=True)
    for number, kind in enumerate((dcp.DefaultSavePlanner, torch_ckpt.SavePlanner, ours, ours)):
        path = context.folder / str(number)
        torch_ckpt.save(
            source,
            checkpoint_id=path,
            planner=kind(),
            layout="final",
            max_shard_size=1024,  # two tensors
        )
        files = sorted(path.glob("*.safetensors"))
        found = [sorted(load_file(file)) for file in files]
        assert found == [["b", "d"], ["a", "e"], ["c", "f"]], found
        dist.barrier()


@case
def in_the_background(context: Context) -> None:
    table = layouts(context.world)
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        path = context.folder / kind.name
        source = {**state(table), "step": 7}
        save = torch_ckpt.async_save(
            source,
            checkpoint_id=path,
            layout="final",
            max_shard_size="2KB",
            async_checkpointer_type=kind,
        )
        for value in source.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        save.result()
        check_final(path, table)
        target: dict[str, Any] = {**state(table, blank=True), "step": 0}
        torch_ckpt.load(target, checkpoint_id=path)
        check(target, table)
        assert target["step"] == 7
        dist.barrier()


@case
def random_placements(context: Context) -> None:
    """Rows, columns and both, of any size, in files of any size, over what was there before."""
    chance = random.Random(context.world)
    path = context.folder / "c"
    meshes = [mesh_of((context.world,))]
    if context.world % 2 == 0:
        meshes.append(mesh_of((2, context.world // 2)))
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool)
    for _ in range(15):
        source: dict[str, Any] = {}
        expected: dict[str, torch.Tensor] = {}
        for number in range(chance.randint(1, 6)):
            ndim = chance.randint(1, 4)
            shape = tuple(chance.randint(1, 200 if ndim < 3 else 17) for _ in range(ndim))
            mesh = chance.choice(meshes)
            placements = [
                Replicate() if chance.random() < 0.2 else Shard(chance.randrange(ndim))
                for _ in range(mesh.ndim)
            ]
            name = f"t{number}"
            expected[name] = whole(name, shape).to(chance.choice(dtypes))
            source[name] = distribute_tensor(expected[name], mesh, placements)
        size = chance.choice([None, 1000, 10_000])
        with nodes(context, chance.randint(1, context.world)):
            torch_ckpt.save(source, checkpoint_id=path, layout="final", max_shard_size=size)
        saved = final_tensors(path)
        assert saved.keys() == expected.keys()
        for name, value in expected.items():
            assert saved[name].dtype == value.dtype
            assert torch.equal(saved[name], value), name
        Checkpoint(path).verify()
        dist.barrier()


@case
def columns_on_nodes(context: Context) -> None:
    """What is cut into columns on a node, and into rows or not at all over the nodes, goes through
    the rings of the nodes, and nothing is left for the coordinator but edges."""
    if context.world % 4 != 0:
        return
    mesh = mesh_of((context.world // 2, 2))
    shape = (4096, 40)
    for first in (Shard(0), Replicate()):
        source: dict[str, Any] = {
            f"t{number}": distribute_tensor(whole(f"t{number}", shape), mesh, [first, Shard(1)])
            for number in range(4)
        }
        path = context.folder / type(first).__name__
        with nodes(context, context.world // 2):
            metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final")
        saved = final_tensors(path)
        for name in source:
            assert torch.equal(saved[name], whole(name, shape)), name
        phases = metadata.storage_data.values()
        assert sum(of_rank.ring_bytes for of_rank in phases) == sum(
            tensor.nbytes for tensor in saved.values()
        )
        edges = 2 * 4096 * len(source) * (context.world // 2)
        assert sum(of_rank.spill_bytes for of_rank in phases) <= edges
        dist.barrier()


@case
def ranks_without_a_part(context: Context) -> None:
    """Stock's planner has an empty box there."""
    if context.world % 2 != 0:
        return
    mesh, line = mesh_of((2, context.world // 2)), mesh_of((context.world,))
    rows = context.world - 1  # one rank gets none
    source: dict[str, Any] = {
        "grid": distribute_tensor(whole("grid", (1, 9, 40)), mesh, [Shard(0), Shard(2)]),
        "rows": distribute_tensor(whole("rows", (rows, 10_000)), line, [Shard(0)]),
        "columns": distribute_tensor(whole("columns", (3000, rows)), line, [Shard(1)]),
    }
    for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
        for count in (1, 2):
            path = context.folder / f"{kind.__module__}-{count}"
            with nodes(context, count):
                torch_ckpt.save(source, checkpoint_id=path, planner=kind(), layout="final")
            saved = final_tensors(path)
            for name, tensor in source.items():
                assert torch.equal(saved[name], whole(name, tensor.shape)), name
            dist.barrier()


@case
def cached_plans(context: Context) -> None:
    """The files are laid out of the plan that is cached; one that fits no more is refused."""
    table = {name: layout for name, layout in layouts(context.world).items() if name != "empty"}
    for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
        writer = HuggingFaceStorageWriter(context.folder / "unused", layout="final")
        for number in range(4):
            path = context.folder / f"{kind.__module__}-{number}"
            torch_ckpt.save(
                state(table),
                checkpoint_id=path,
                storage_writer=writer,
                planner=kind(enable_plan_caching=True),
            )
            check_final(path, table)
            dist.barrier()


@case
def cached_plans_of_a_sharded_save(context: Context) -> None:
    """The plan is the same; what the coordinator knows of the ranks beside it is not."""
    if context.world == 1:
        return
    mesh = mesh_of((context.world,))
    source = {"w": distribute_tensor(whole("w", (4096, 8 * context.world)), mesh, [Shard(1)])}
    for layout in ("sharded", "final", "final"):
        metadata = torch_ckpt.save(
            source,
            checkpoint_id=context.folder / "c",
            planner=torch_ckpt.SavePlanner(enable_plan_caching=True),
            layout=layout,
        )
    assert metadata.storage_data[0].ring_bytes > 0, metadata.storage_data
    assert torch.equal(final_tensors(context.folder / "c")["w"], whole("w", source["w"].shape))


@case
def ranks_of_other_layouts(context: Context) -> None:
    """Only rank 0 saves final files: all must."""
    if context.world == 1:
        return
    layout = "final" if context.rank == 0 else "sharded"
    path = context.folder / "c"
    table = {"w": layouts(context.world)["rows"]}
    raised(
        lambda: torch_ckpt.save(state(table), checkpoint_id=path, layout=layout),
        "w",
    )
    dist.barrier()
    assert not path.exists()
    assert list(context.folder.iterdir()) == []


@case
def tied_shards(context: Context) -> None:
    """Where all ranks say so: a name that is tied on one rank only is stored."""
    if context.world == 1:
        return
    mesh = mesh_of((context.world,))
    value = distribute_tensor(whole("rows", (12, 5)), mesh, [Shard(0)])
    other = distribute_tensor(whole("other", (12, 5)), mesh, [Shard(0)])
    source = {
        "embed": value,
        "head": value,
        "sometimes": value if context.rank == 0 else other,
        "plain": whole("plain", (4,)),
    }
    path = context.folder / "c"
    torch_ckpt.save(source, checkpoint_id=path, layout="final")
    tensors = final_tensors(path)
    assert tensors.keys() == {"embed", "sometimes", "plain"}
    assert torch.equal(tensors["embed"], whole("rows", (12, 5)))
    expected = other.full_tensor()
    part = value.to_local() if context.rank == 0 else None
    first = [part]
    dist.broadcast_object_list(first, src=0)
    assert first[0] is not None
    expected[: len(first[0])] = first[0]
    assert torch.equal(tensors["sometimes"], expected)
    target = {name: torch.zeros(12, 5) for name in ("embed", "head")}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["head"], whole("rows", (12, 5)))


@case
def under_other_names(context: Context) -> None:
    table = layouts(context.world)
    for layout in ("final", "sharded"):
        path = context.folder / layout
        renaming = {"^": "model."}
        if layout == "final":
            torch_ckpt.save(state(table), checkpoint_id=path, layout=layout, key_mapping=renaming)
        else:
            torch_ckpt.async_save(
                state(table),
                checkpoint_id=path,
                key_mapping=renaming,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
        names = {tensor.name for tensor in Checkpoint(path).describe().tensors}
        assert names == {f"model.{name}" for name in table}
        target = state(table, blank=True)
        torch_ckpt.load(target, checkpoint_id=path, key_mapping=[("^model[.]", "")])
        check(target, table)
        dist.barrier()


class Failing:
    """A Stateful that has no state."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("there is no state here")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


@case
def what_one_rank_is_told_wrong(context: Context) -> None:
    """It is an error on all, before anything is written, and nobody waits for that rank."""
    path = context.folder / "c"
    content = {"a": whole("a", (5, 3)), "b": whole("b", (17,))}
    last = context.world - 1
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layout": "final", "dtype": "nothing"}, "dtype='nothing'"),
        ({"layout": "final", "fqn_to_index_mapping": "nothing"}, "nothing"),
        ({"layout": "nothing"}, "layout='nothing'"),
        ({"key_mapping": 7}, "key_mapping"),
        ({"no_such_option": 7}, "no_such_option"),
    ]
    for options, says in wrong:
        layout = "final" if options.get("layout") == "final" else "sharded"
        own = options if context.rank == last else {"layout": layout}
        raised(lambda own=own: torch_ckpt.save(content, checkpoint_id=path, **own), says)
    source = {**content, "s": Failing()} if context.rank == last else content
    raised(lambda: torch_ckpt.save(source, checkpoint_id=path), "there is no state here")
    dist.barrier()
    assert os.listdir(context.folder) == []
    torch_ckpt.save(content, checkpoint_id=path)
    target = {name: torch.zeros_like(value) for name, value in content.items()}
    torch_ckpt.load(target, checkpoint_id=path)
    assert all(torch.equal(target[name], value) for name, value in content.items())


@case
def a_value_that_a_cast_loses(context: Context) -> None:
    """However it reaches its file: as rows, through a ring, put in place by the coordinator, in the
    background, from shards. The last rank alone has it."""
    mesh = mesh_of((context.world,))
    value = torch.zeros(8 * context.world, 8 * context.world)
    value[-1, -1] = 7e4
    lost = f"rank {context.world - 1}", "at least 1 values of F32 would be out of range as F16"
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1))):
        state = {name: distribute_tensor(value, mesh, [placement])}
        options: dict[str, Any] = {"layout": "final", "dtype": "fp16"}
        path, out = context.folder / name, context.folder / f"{name}-out"

        def save(state: Any = state, path: Path = path, options: Any = options) -> None:
            torch_ckpt.save(state, path, **options)

        def save_beside(state: Any = state, path: Path = path, options: Any = options) -> None:
            torch_ckpt.async_save(state, path, **options).result()

        for count in {1, min(2, context.world)}:
            with nodes(context, count):
                raised(save, f"'{name}'", *lost)
        raised(save_beside, f"'{name}'", *lost)
        dist.barrier()
        assert not os.path.exists(path)
        torch_ckpt.save(state, path)

        def merge(path: Path = path, out: Path = out) -> None:
            torch_ckpt.consolidate_safetensors_files_on_every_rank(path, out, dtype="fp16")

        raised(merge, f"'{name}'", lost[1])
        dist.barrier()
        assert not os.path.exists(out)
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            path, out, dtype="fp16", keep_fp32=[name]
        )
        assert torch.equal(final_tensors(out)[name], value)
        dist.barrier()
