"""torch_ckpt.megatron.dist_checkpointing on several ranks."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.layouts import DEVICE
from ranks.run import Context, cases, everywhere, raised

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing, saving
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

CASES, case = cases()

LAYERS, HIDDEN = 3, 24  # of which 1, 2, 3 and 4 ranks have a part alike


def whole(name: str, *shape: int) -> torch.Tensor:
    """A tensor that its name and shape say."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(shape, generator=generator)


def part(tensor: torch.Tensor, axis: int, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world, axis)[rank].clone()


def swiglu(key: str, data: torch.Tensor, rank: int, world: int) -> ShardedTensorFactory:
    """The two halves of `data` are boxes of one tensor, as in Megatron's MLP."""

    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key, half, (0, rank + at * world, 2 * world), replica_id=replica
            )
            for at, half in enumerate(data.chunk(2))
        ]

    return ShardedTensorFactory(key, data, build, torch.cat)


def gpt(rank: int, world: int, filled: bool = True) -> dict[str, Any]:
    """The state of a model that is cut as Megatron's are by tensor parallelism."""

    def of(value: torch.Tensor) -> torch.Tensor:
        return (value if filled else torch.full_like(value, -1.0)).to(DEVICE)

    state: dict[str, Any] = {"layers": []}
    for layer in range(LAYERS):
        qkv = part(whole(f"qkv{layer}", HIDDEN, 5), 0, rank, world)
        gate, up = (
            part(whole(f"{name}{layer}", HIDDEN, 3), 0, rank, world) for name in ("gate", "up")
        )
        state["layers"].append(
            {
                "qkv": ShardedTensor.from_rank_offsets(
                    "layers.qkv", of(qkv), (0, layer, LAYERS), (1, rank, world), prepend_axis_num=1
                ),
                "fc1": swiglu(f"layers.{layer}.fc1", of(torch.cat([gate, up])), rank, world),
                "norm": ShardedTensor.from_rank_offsets(
                    f"layers.{layer}.norm", of(whole(f"norm{layer}", 7)), replica_id=rank
                ),
                "_extra_state": ShardedObject(
                    f"layers.{layer}._extra_state", b"scale" if filled else None, (1,), (0,), rank
                ),
            }
        )
    state["rng"] = ShardedObject(
        "rng_state", [rank, (1, "x")] if filled else None, (world,), (rank,)
    )
    state["local"] = LocalNonpersistentObject({"rank": rank})
    state["iteration"] = 100 if filled else -5
    state["args"] = argparse.Namespace(lr=0.1, dtype=torch.bfloat16)
    state["optimizer"] = {"param_groups": [{"lr": 0.5, "params": LocalNonpersistentObject([rank])}]}
    return state


def check(loaded: dict[str, Any], rank: int, world: int, saved_by: int) -> None:
    for layer, found in enumerate(loaded["layers"]):
        assert torch.equal(
            found["qkv"].cpu(), part(whole(f"qkv{layer}", HIDDEN, 5), 0, rank, world)
        )
        halves = [
            part(whole(f"{name}{layer}", HIDDEN, 3), 0, rank, world) for name in ("gate", "up")
        ]
        assert torch.equal(found["fc1"].cpu(), torch.cat(halves))
        assert torch.equal(found["norm"].cpu(), whole(f"norm{layer}", 7))
        assert found["_extra_state"] == b"scale"
    assert len(loaded["layers"]) == LAYERS
    assert loaded["local"] == {"rank": rank}
    assert loaded["iteration"] == 100
    assert loaded["args"] == argparse.Namespace(lr=0.1, dtype=torch.bfloat16)
    assert loaded["optimizer"] == {"param_groups": [{"lr": 0.5, "params": [rank]}]}
    if world == saved_by:
        assert loaded["rng"] == [rank, (1, "x")]


@case
def save(context: Context) -> None:
    path = context.shared / f"megatron-{context.world}"
    state = gpt(context.rank, context.world)
    before = [*state["layers"][0].values()]
    dist_checkpointing.save(state, path, content_metadata={"kind": "test"})
    assert all(a is b for a, b in zip(before, state["layers"][0].values(), strict=True))
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert dist_checkpointing.load_content_metadata(path) == {"kind": "test"}
    assert json.loads((path / "metadata.json").read_text()) == {
        "sharded_backend": "torch_ckpt",
        "sharded_backend_version": 1,
    }
    torch_ckpt.open(path).verify()
    data = [each.name for each in path.glob("shard-*.safetensors")]
    assert len(data) == context.world, data  # one file a rank


@case
def load_in_other_worlds(context: Context) -> None:
    rank, world = context.rank, context.world
    found = sorted(context.shared.glob("megatron-[0-9]"))
    assert found
    for path in found:
        saved_by = int(path.name.rpartition("-")[2])
        request = gpt(rank, world, filled=False)
        if world != saved_by:
            del request["rng"]  # objects are not resharded
        memory = request["layers"][1]["fc1"].data
        address = memory.data_ptr()
        loaded = dist_checkpointing.load(request, path)
        check(loaded, rank, world, saved_by)
        assert loaded["layers"][1]["fc1"].data_ptr() == address  # merged without a copy
        assert loaded["content_metadata"] == {"kind": "test"}


@case
def whole_tensors_are_what_was_saved(context: Context) -> None:
    path = context.folder / "c"
    dist_checkpointing.save(gpt(context.rank, context.world), path)
    loaded = dist_checkpointing.load_plain_tensors(path)
    stacked = torch.stack([whole(f"qkv{layer}", HIDDEN, 5) for layer in range(LAYERS)])
    assert torch.equal(loaded["layers.qkv"], stacked)
    assert torch.equal(torch_ckpt.open(path)["layers.qkv"][...], stacked)
    found = dist_checkpointing.load_sharded_metadata(path)
    names = {f"rng_state/shard_{rank}_{context.world}" for rank in range(context.world)}
    assert names < found.keys()
    assert not any(name.startswith(("common_state", "content_metadata")) for name in found)


@case
def ranks_share_what_they_all_have(context: Context) -> None:
    path, world = context.folder / "c", context.world
    names = [f"w{number}" for number in range(8 * world)]

    def state(filled: bool) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(
                name,
                whole(name, 64) if filled else torch.zeros(64),
                replica_id=(0, 0, context.rank),
            )
            for name in names
        }

    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_checkpointing.save(state(True), path, strategy)
    sizes = [each.stat().st_size for each in sorted(path.glob("shard-*.safetensors"))]
    assert len(sizes) == world, sizes
    reading = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    loaded = dist_checkpointing.load(state(False), path, reading)
    assert all(torch.equal(loaded[name], whole(name, 64)) for name in names)


@case
def large_parts_are_written_by_all_that_have_them(context: Context) -> None:
    path, world = context.folder / "c", context.world
    value = whole("large", 3, 500 * world, 1024)  # 6 MiB for each rank

    def state(filled: bool) -> dict[str, Any]:
        return {
            "layers": [
                ShardedTensor.from_rank_offsets(
                    "large",
                    layer.clone() if filled else torch.zeros_like(layer),
                    (0, number, 3),
                    prepend_axis_num=1,
                    replica_id=context.rank,
                )
                for number, layer in enumerate(value)
            ]
        }

    for strategy in (
        TorchDistSaveShardedStrategy(keep_only_main_replica=False),
        FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
    ):
        dist_checkpointing.save(state(True), path, strategy)
        sizes = [each.stat().st_size for each in path.glob("shard-*.safetensors")]
        assert len(sizes) == world and max(sizes) - min(sizes) < 1.2 * (1 << 20), sizes
    loaded = dist_checkpointing.load(state(False), path, verify_integrity=True)
    assert torch.equal(torch.stack(loaded["layers"]), value)
    whole_ones = dist_checkpointing.load_plain_tensors(path)
    assert torch.equal(whole_ones["large"], value)


@case
def what_ranks_agreed_on_is_kept_while_nothing_changes(context: Context) -> None:
    rank, world = context.rank, context.world
    wrapper = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), None, True)
    strategies = [wrapper, TorchDistSaveShardedStrategy(cached_metadata=True)]
    looked: list[int] = []

    def check_layouts(layouts: Any, **options: bool) -> None:
        looked.append(len(layouts))
        return stock(layouts, **options)

    def state(value: float, more: int = 0, step: int = 0) -> dict[str, Any]:
        made: dict[str, Any] = {
            str(number): ShardedTensor.from_rank_offsets(
                f"w{number}", torch.full((3,), value + number), replica_id=rank
            )
            for number in range(5)
        }
        for number in range(more):
            made[f"more{number}"] = ShardedTensor.from_rank_offsets(
                f"more{number}", torch.full((2,), value)
            )
        return {**made, "step": step}

    stock = saving.check_layouts
    with mock.patch.object(saving, "check_layouts", check_layouts):
        for number, strategy in enumerate(strategies):
            path = context.folder / str(number)

            def save(state: dict[str, Any], strategy: Any = strategy, path: Any = path) -> bool:
                """Whether rank 0 has looked at all."""
                looked.clear()
                dist_checkpointing.save(state, path, strategy)
                return bool(everywhere(len(looked))[0])

            last = rank == world - 1
            assert save(state(0.0))
            for value in (1.0, 2.0):
                assert not save(state(value, step=int(value)))
            found = dist_checkpointing.load_plain_tensors(path)
            assert all(torch.equal(found[f"w{n}"], torch.full((3,), 2.0 + n)) for n in range(5))
            assert found["step"] == 2
            assert save(state(3.0, more=int(last)))  # on one rank
            assert not save(state(4.0, more=int(last)))
            found = dist_checkpointing.load_plain_tensors(path)
            assert found["more0"].tolist() == [4.0, 4.0] and found["w4"].tolist() == [8.0] * 3
            assert world == 1 or save(state(5.0, step=rank))  # what is to be alike is not
            hole = state(6.0)
            if rank == 0:
                hole["0"] = ShardedTensor.from_rank_offsets("w0", torch.ones(3), replica_id=9)
            raised(lambda hole=hole: save(hole), "hole", "'w0'")
            raised(lambda hole=hole: save(hole), "hole", "'w0'")
            assert save(state(7.0)) == (world == 1)  # as in the last one that was agreed on
            assert "more0" not in dist_checkpointing.load_plain_tensors(path)
            assert not save(state(8.0))
    assert dist_checkpointing.load_plain_tensors(context.folder / "1")["w0"].tolist() == [8.0] * 3


@case
def ranks_share_within_groups(context: Context) -> None:
    if context.world < 4:
        return
    path = context.folder / "c"
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = context.rank // 2
    # Main replicas are on ranks 0 and 1 (of one tensor) and 2 and 3 (of the other); each rank has
    # both, and is not to write the other group's.
    state = {
        name: ShardedTensor.from_rank_offsets(
            name,
            whole(name, 512),
            replica_id=(context.rank % 2, 0 if number == own else 1),
        )
        for number, name in enumerate(("a", "b"))
    }
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups[own])
    dist_checkpointing.save(state, path, strategy)
    loaded = dist_checkpointing.load_plain_tensors(path)
    assert all(torch.equal(loaded[name], whole(name, 512)) for name in ("a", "b"))
    files = torch_ckpt.open(path).describe().files
    assert len([each for each in files if each.name.endswith(".safetensors")]) == 2


@case
def a_group_loads_by_itself(context: Context) -> None:
    """Each asks for what the others do not, and its errors count ranks within it."""
    if context.world < 4:
        return
    path = context.folder / "c"
    names = ("a", "b")
    dist_checkpointing.save(
        {
            name: ShardedTensor.from_rank_offsets(name, whole(name, 8), replica_id=context.rank)
            for name in names
        },
        path,
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = context.rank // 2

    def request(size: int) -> dict[str, Any]:
        place = (0, context.rank % 2, 2)
        return {"w": ShardedTensor.from_rank_offsets(names[own], torch.zeros(size), place)}

    half = slice(4 * (context.rank % 2), 4 * (context.rank % 2) + 4)
    loaded = dist_checkpointing.load(request(4), path, process_group=groups[own])["w"]
    assert torch.equal(loaded, whole(names[own], 8)[half])
    error = raised(
        lambda: dist_checkpointing.load(
            request(4 if context.rank % 2 == 0 else 3), path, process_group=groups[own]
        ),
        "ranks 0 and 1 disagree",
        f"'{names[own]}'",
    )
    assert isinstance(error, CheckpointingException)
    outside = groups[1 - own]
    error = raised(lambda: dist_checkpointing.load({}, path, process_group=outside), "is not in")
    assert isinstance(error, CheckpointingException)


@case
def ranks_share_only_what_has_a_main_replica(context: Context) -> None:
    """Rank 0 has all; the others have it as two replicas."""
    value = torch.arange(4.0)
    boxes = [(0, 4)] if context.rank == 0 else [(0, 2), (2, 2)]
    state = {
        "k": [
            ShardedTensor(
                *("k", value[at : at + size].clone(), torch.float32, (size,), (4,), (at,), None),
                replica_id=context.rank,
            )
            for at, size in boxes
        ]
    }
    shared = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_checkpointing.save(state, context.folder / "k", shared)
    assert torch.equal(dist_checkpointing.load_plain_tensors(context.folder / "k")["k"], value)


@case
def any_one_rank_removes_tensors(context: Context) -> None:
    path = context.folder / "c"

    def entry(key: str) -> ShardedTensor:
        data = torch.arange(4.0) + context.rank
        return ShardedTensor.from_rank_offsets(key, data, (0, context.rank, context.world))

    dist_checkpointing.save({"a": entry("a"), "b": entry("optimizer.b"), "step": 2}, path)
    if context.rank == context.world - 1:
        dist_checkpointing.remove_sharded_tensors(path, "optimizer.")
    dist.barrier()
    assert dist_checkpointing.load_sharded_metadata(path).keys() == {"a"}
    loaded = dist_checkpointing.load({"a": entry("a")}, path)
    assert torch.equal(loaded["a"], torch.arange(4.0) + context.rank) and loaded["step"] == 2


@case
def common_state_that_differs_is_told_once(context: Context) -> None:
    path = context.folder / "c"
    own = {"last": 1} if context.rank == context.world - 1 else {}
    state = {"step": 7, "own": {"rank": context.rank}, "lr": {"at": 1, **own}}
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch_ckpt")
    logger.addHandler(handler)
    try:
        dist_checkpointing.save(state, path)
        common = {
            "step": 7,
            "own": {"rank": 0},
            "lr": {"at": 1, **(own if context.world == 1 else {})},
        }
        assert dist_checkpointing.load_common_state_dict(path) == common
        differ = context.rank == 0 and context.world > 1
        assert len(told) == differ, told
        if differ:
            said = told[0].getMessage()
            assert "own.rank (ranks 0 and 1)" in said and "lr.last (ranks 0 and" in said, said
            assert "step" not in said and "lr.at" not in said, said
        dist_checkpointing.save(
            state,
            path,
            preprocess_common_before_consistancy_check=lambda common: {"step": common["step"]},
        )
        assert len(told) == differ, told
    finally:
        logger.removeHandler(handler)
    assert dist_checkpointing.load({}, path) == common


@case
def boxes_of_any_sizes(context: Context) -> None:
    """Several boxes of one key on a rank, as the distributed optimizer has them."""
    path, rank, world = context.folder / "c", context.rank, context.world
    value = whole("flat", 10 * world)

    def state(filled: bool) -> dict[str, Any]:
        cuts = [0, 3, 7, 10]
        return {
            str(at): ShardedTensor(
                "flat, (with) a comma/and a slash",
                value[10 * rank + at : 10 * rank + end].clone()
                if filled
                else torch.zeros(end - at),
                torch.float32,
                (end - at,),
                (10 * world,),
                (10 * rank + at,),
                None,
            )
            for at, end in zip(cuts, cuts[1:], strict=False)
        }

    dist_checkpointing.save(state(True), path)
    loaded = dist_checkpointing.load(state(False), path)
    found = torch.cat([loaded["0"], loaded["3"], loaded["7"]])
    assert torch.equal(found, value[10 * rank : 10 * rank + 10])
    (plain,) = [
        each for each in dist_checkpointing.load_plain_tensors(path).values() if each.numel() > 1
    ]
    assert torch.equal(plain, value)
