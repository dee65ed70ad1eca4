"""Columns that are redistributed to rows before they are saved."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.final import final_tensors, nodes
from ranks.layouts import check, layouts, mesh_of, odd_nesting, several_boxes, state, whole
from ranks.run import Context, cases, everywhere, raised
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import Checkpoint
from torch_ckpt.dcp.rings import Node

CASES, case = cases()
SHAPE = (4099, 40)


def columns(context: Context, count: int = 3) -> dict[str, Any]:
    mesh = mesh_of((context.world,))
    return {
        f"t{i}": distribute_tensor(whole(f"t{i}", SHAPE), mesh, [Shard(1)]) for i in range(count)
    }


def total(metadata: Metadata, what: str) -> int:
    """Of all ranks."""
    return sum(getattr(of_rank, what) for of_rank in metadata.storage_data.values())


@case
def every_layout(context: Context) -> None:
    table = layouts(context.world) | several_boxes(context.world) | odd_nesting(context.world)
    path = context.folder / "c"
    source = state(table)
    metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final", redistribute=True)
    assert total(metadata, "redistributed_bytes") > 0 or context.world == 1
    saved = final_tensors(path)
    assert saved.keys() == table.keys()
    for name, layout in table.items():
        assert torch.equal(saved[name], whole(name, layout.shape)), name
    Checkpoint(path).verify()
    check(source, table)
    target = state(table, blank=True)
    torch_ckpt.load(target, checkpoint_id=path)
    check(target, table)


@case
def random_placements(context: Context) -> None:
    chance = random.Random(context.world)
    meshes = [mesh_of((context.world,))]
    if context.world % 2 == 0:
        meshes.append(mesh_of((2, context.world // 2)))
    if context.world % 4 == 0:
        meshes.append(mesh_of((2, context.world // 4, 2)))
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool)
    redistributed = 0
    for number in range(15):
        source: dict[str, Any] = {}
        expected: dict[str, torch.Tensor] = {}
        for i in range(chance.randint(1, 8)):
            shape = tuple(chance.randint(1, 60) for _ in range(chance.randint(1, 4)))
            mesh = chance.choice(meshes)
            placements = [
                Replicate() if chance.random() < 0.2 else Shard(chance.randrange(len(shape)))
                for _ in range(mesh.ndim)
            ]
            expected[f"t{i}"] = whole(f"t{i}", shape).to(chance.choice(dtypes))
            source[f"t{i}"] = distribute_tensor(expected[f"t{i}"], mesh, placements)
        path = context.folder / str(number)
        bucket = chance.choice([1, 5000, 1 << 26])
        with mock.patch("torch_ckpt.dcp.redistribute._BUCKET_BYTES", bucket):
            metadata = torch_ckpt.save(
                source,
                checkpoint_id=path,
                layout="final",
                dtype=chance.choice([None, "bf16"]),
                redistribute=chance.choice([True, True, None]),
            )
        redistributed += total(metadata, "redistributed_bytes")
        saved = final_tensors(path)
        assert saved.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(saved[name], value.to(saved[name].dtype)), name
        dist.barrier()
    assert redistributed > 0 or context.world == 1


@case
def where_columns_are_on_several_nodes(context: Context) -> None:
    if context.world == 1:
        return
    size = 4 * 3 * SHAPE[0] * SHAPE[1]
    for count in (1, context.world):
        source = columns(context)
        path = context.folder / str(count)
        with nodes(context, count):
            metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final")
        assert total(metadata, "redistributed_bytes") == (size if count > 1 else 0)
        assert total(metadata, "ring_bytes") == (0 if count > 1 else size)
        edges = 2 * 4096 * 3 * context.world
        assert total(metadata, "parts_bytes") <= edges
        for name, tensor in final_tensors(path).items():
            assert torch.equal(tensor, whole(name, SHAPE)), name
        dist.barrier()


@case
def only_what_is_on_several_nodes(context: Context) -> None:
    if context.world % 2 != 0:
        return
    mesh = mesh_of((2, context.world // 2))
    source = {
        "rows": distribute_tensor(whole("rows", SHAPE), mesh, [Shard(0), Shard(0)]),
        "on_a_node": distribute_tensor(whole("on_a_node", SHAPE), mesh, [Shard(0), Shard(1)]),
        "replicas": distribute_tensor(whole("replicas", SHAPE), mesh, [Replicate(), Shard(1)]),
        "on_nodes": distribute_tensor(whole("on_nodes", SHAPE), mesh, [Shard(1), Replicate()]),
    }
    path = context.folder / "c"
    with nodes(context, 2):
        metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final")
    of_all = SHAPE[0] * SHAPE[1] * 4
    assert total(metadata, "redistributed_bytes") == of_all * context.world // 2
    for name, tensor in final_tensors(path).items():
        assert torch.equal(tensor, whole(name, SHAPE)), name


@case
def in_the_background(context: Context) -> None:
    if context.world == 1:
        return
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        source = columns(context)
        path = context.folder / kind.name
        save = torch_ckpt.async_save(
            {"model": OrderedDict(source), "list": [source["t0"], 3], "step": 7},
            checkpoint_id=path,
            layout="final",
            redistribute=True,
            async_checkpointer_type=kind,
        )
        for value in source.values():
            value.zero_()
        save.result()
        assert sum(everywhere(save.stats.redistributed_bytes)) == 4 * 3 * SHAPE[0] * SHAPE[1]
        saved = final_tensors(path)
        assert saved.keys() == {f"model.{name}" for name in source}  # the list's is tied
        for name in source:
            assert torch.equal(saved[f"model.{name}"], whole(name, SHAPE)), name
        target: dict[str, Any] = {"list": [torch.zeros(SHAPE), 0], "step": 0}
        torch_ckpt.load(target, checkpoint_id=path)
        assert torch.equal(target["list"][0], whole("t0", SHAPE))
        assert target["list"][1] == 3 and target["step"] == 7
        dist.barrier()


@case
def a_trainer_does_not_wait_for_gloo(context: Context) -> None:
    """Where nobody has asked for it."""
    with nodes(context, context.world):
        save = torch_ckpt.async_save(
            columns(context), checkpoint_id=context.folder / "c", layout="final"
        )
        save.result()
    assert save.stats.redistributed_bytes == 0
    for name, tensor in final_tensors(context.folder / "c").items():
        assert torch.equal(tensor, whole(name, SHAPE)), name


@case
def the_state_stays_as_it_is(context: Context) -> None:
    inner = columns(context)
    source = {"model": inner, "list": [inner["t0"]], "plain": torch.ones(3)}
    before = dict(inner)
    torch_ckpt.save(source, checkpoint_id=context.folder / "c", layout="final", redistribute=True)
    assert source["model"] is inner and source["list"][0] is before["t0"]
    assert all(inner[name] is tensor for name, tensor in before.items())
    for name, tensor in inner.items():
        assert tensor.placements == (Shard(1),)
        assert torch.equal(tensor.full_tensor(), whole(name, SHAPE))


@case
def with_cached_plans(context: Context) -> None:
    for number in range(3):
        source = columns(context)
        path = context.folder / str(number)
        metadata = torch_ckpt.save(
            source,
            checkpoint_id=path,
            planner=torch_ckpt.SavePlanner(enable_plan_caching=True),
            layout="final",
            redistribute=True,
        )
        assert context.world == 1 or total(metadata, "redistributed_bytes") > 0
        for name, tensor in final_tensors(path).items():
            assert torch.equal(tensor, whole(name, SHAPE)), name
        dist.barrier()


@case
def ranks_that_do_not_agree(context: Context) -> None:
    """Nothing is redistributed then, and nobody waits for long."""
    if context.world == 1:
        return
    last = context.rank == context.world - 1
    source = columns(context)
    lacking = {name: tensor for name, tensor in source.items() if name != "t1"}
    turned = dict(reversed(source.items()))
    for number, (own, wanted) in enumerate(
        [
            (source, False if last else True),  # one does not come
            (source, None if last else True),
            (lacking if last else source, True),
            (turned if last else source, True),
            (source, False if context.rank == 0 else True),
        ]
    ):
        path = context.folder / str(number)
        metadata = None
        with mock.patch("torch_ckpt.dcp.redistribute._SECONDS", 0.5):
            try:
                metadata = torch_ckpt.save(
                    own, checkpoint_id=path, layout="final", redistribute=wanted
                )
            except ValueError as error:
                assert number == 2 and "t1" in str(error)  # columns that nobody has
        assert (metadata is None) == (number == 2)
        if metadata is not None:
            assert total(metadata, "redistributed_bytes") == 0, number
            for name, tensor in final_tensors(path).items():
                assert torch.equal(tensor, whole(name, SHAPE)), name
        dist.barrier()


@case
def a_rank_that_comes_late(context: Context) -> None:
    """Nobody waits for it, it does as the others did, and the next save is as ever."""
    if context.world == 1:
        return
    for number, late in enumerate((context.world - 1, 0, None)):
        source = columns(context)
        path = context.folder / str(number)
        with mock.patch("torch_ckpt.dcp.redistribute._SECONDS", 0.3 if late is not None else 60):
            time.sleep(1.0 if context.rank == late else 0.0)
            metadata = torch_ckpt.save(
                source, checkpoint_id=path, layout="final", redistribute=True
            )
        assert (total(metadata, "redistributed_bytes") > 0) == (late is None)
        for name, tensor in final_tensors(path).items():
            assert torch.equal(tensor, whole(name, SHAPE)), name
        dist.barrier()


@case
def replicas_on_meshes_of_their_own(context: Context) -> None:
    """What is on one mesh only decides for all that have the same tensors, or they would disagree
    about the boxes of one tensor."""
    if context.world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inner = mesh["tp"]
    source = {
        f"t{i}": distribute_tensor(whole(f"t{i}", SHAPE), inner, [Shard(1)]) for i in range(3)
    }
    # Ranks 0 and 1 on one node, 2 and 3 on two.
    for number, node_of in enumerate(([0, 0, 1, 2], [0, 0, 1, 1])):
        node = Node("boot", str(node_of[context.rank]), 0)
        path = context.folder / str(number)
        with mock.patch("torch_ckpt.dcp.redistribute.this_node", return_value=node):
            metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final")
        assert (total(metadata, "redistributed_bytes") > 0) == (number == 0)
        for name, tensor in final_tensors(path).items():
            assert torch.equal(tensor, whole(name, SHAPE)), name
        dist.barrier()


@case
def a_group_of_some_ranks_saves(context: Context) -> None:
    """A mesh that has others as well is left alone, and nobody waits for these."""
    if context.world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    placements = ([Replicate(), Shard(1)], [Shard(1)])
    for number, (where, placed) in enumerate(zip((mesh, mesh["tp"]), placements, strict=True)):
        source = {"t": distribute_tensor(whole("t", SHAPE), where, placed)}
        if context.rank < 2:
            path = context.folder / str(number)
            metadata = torch_ckpt.save(
                source,
                checkpoint_id=path,
                process_group=group,
                layout="final",
                redistribute=True,
            )
            assert (total(metadata, "redistributed_bytes") > 0) == (number == 1)
            assert torch.equal(final_tensors(path)["t"], whole("t", SHAPE))
        dist.barrier()


@case
def one_rank_has_no_room(context: Context) -> None:
    if context.world == 1:
        return
    path = context.folder / "c"
    has_room = context.rank > 0
    with mock.patch("torch_ckpt.dcp.redistribute._has_room", return_value=has_room):
        metadata = torch_ckpt.save(
            columns(context), checkpoint_id=path, layout="final", redistribute=True
        )
    assert total(metadata, "redistributed_bytes") == 0
    for name, tensor in final_tensors(path).items():
        assert torch.equal(tensor, whole(name, SHAPE)), name


@case
def two_meshes_of_the_same_ranks(context: Context) -> None:
    if context.world == 1:
        return
    names = ("one", "other")
    meshes = [init_device_mesh("cpu", (context.world,), mesh_dim_names=(name,)) for name in names]
    source = {
        name: distribute_tensor(whole(name, SHAPE), mesh, [Shard(1)])
        for name, mesh in zip(names, meshes, strict=True)
    }
    path = context.folder / "c"
    metadata = torch_ckpt.save(source, checkpoint_id=path, layout="final", redistribute=True)
    assert total(metadata, "redistributed_bytes") == 2 * 4 * SHAPE[0] * SHAPE[1]
    for name, tensor in final_tensors(path).items():
        assert torch.equal(tensor, whole(name, SHAPE)), name


@case
def a_rank_that_fails_in_the_exchange(context: Context) -> None:
    """Before it has said anything to others. They hear of it, and nothing is left."""
    if context.world == 1:
        return
    path = context.folder / "c"
    mesh = mesh_of((context.world,))
    replicated = {"r": distribute_tensor(torch.ones(3), mesh, [Replicate()])}
    torch_ckpt.save(replicated, checkpoint_id=path, layout="final")
    source = columns(context)

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    with mock.patch("torch_ckpt.dcp.redistribute._all_to_all", fails):
        raised(
            lambda: torch_ckpt.save(source, checkpoint_id=path, layout="final", redistribute=True),
            "the columns were not redistributed: no memory",
            "rank 0",
        )
    assert final_tensors(path).keys() == {"r"}
    source["t0"].requires_grad_()
    planner = torch_ckpt.SavePlanner()
    metadata = torch_ckpt.save(
        source, checkpoint_id=path, planner=planner, layout="final", redistribute=True
    )
    assert metadata.state_dict_metadata["t0"].properties.requires_grad
    assert planner.state_dict == {}
    assert final_tensors(path).keys() == source.keys()


@case
def only_final_files(context: Context) -> None:
    for options in ({"layout": "sharded"}, {}):
        error = None
        try:
            torch_ckpt.save(
                columns(context), checkpoint_id=context.folder / "c", redistribute=True, **options
            )
        except torch_ckpt.InvalidArgumentError as raised:
            error = raised
        assert error is not None and "redistribute" in str(error)
