"""Loads of torch_ckpt.megatron.dist_checkpointing whose ranks read for each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.layouts import DEVICE
from ranks.run import Context, cases, everywhere, raised

from torch_ckpt.dcp.node import Node
from torch_ckpt.megatron import deliveries, dist_checkpointing, loading
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from torch_ckpt.native import operators
from torch_ckpt.ranks import transfers

CASES, case = cases()

SHARING = FullyParallelLoadStrategyWrapper(None)


def whole(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(shape, generator=generator)


class Reads(list[int]):
    """The bytes that each native call of this rank reads.

    shared: of how many targets it is told that another rank of this node reads them as well.
    """

    shared = 0


@contextlib.contextmanager
def on_nodes(context: Context, count: int) -> Iterator[Reads]:
    """As if the ranks were on `count` nodes, with small pieces."""
    node = Node("boot", str(context.rank * count // context.world), 0)
    read, sizes = operators.read, Reads()

    def counted(into: Any, plan: dict[str, Any], *arguments: Any) -> Any:
        sizes.append(sum(each.nbytes for each in into))
        sizes.shared += len(plan.get("shared", ()))
        return read(into, plan, *arguments)

    with (
        mock.patch("torch_ckpt.megatron.loading.this_node", return_value=node),
        mock.patch.object(operators, "read", counted),
        mock.patch.object(deliveries, "_PIECE", 1000),
        mock.patch.object(transfers, "MOST_QUEUED", 5000),
    ):
        yield sizes


def entry(context: Context, key: str, value: torch.Tensor, **options: Any) -> ShardedTensor:
    """Of what all ranks have."""
    return ShardedTensor.from_rank_offsets(key, value, replica_id=context.rank, **options)


@case
def each_byte_is_read_once(context: Context) -> None:
    rank, world, path = context.rank, context.world, context.folder / "c"
    names = [f"w{number}" for number in range(9)]
    values = {name: whole(name, 50 + number, 7) for number, name in enumerate(names)}
    own = whole("own", world, 100)

    def state(filled: bool) -> dict[str, Any]:
        made: dict[str, Any] = {
            name: entry(context, name, (value if filled else torch.zeros_like(value)).to(DEVICE))
            for name, value in values.items()
        }
        part = own[rank] if filled else torch.zeros(100)
        made["own"] = ShardedTensor.from_rank_offsets(
            "own", part.clone(), (0, rank, world), prepend_axis_num=1
        )
        made["object"] = ShardedObject("object", [rank] if filled else None, (world,), (rank,))
        made["step"] = 7
        return made

    dist_checkpointing.save(state(True), path)
    total = sum(value.nbytes for value in values.values()) + own.nbytes
    for count in {1, 2, world}:
        with on_nodes(context, count) as sizes:
            loaded = dist_checkpointing.load(state(False), path, SHARING)
        for name, value in values.items():
            assert torch.equal(loaded[name].cpu(), value), name
        assert torch.equal(loaded["own"], own[rank])
        assert loaded["object"] == [rank] and loaded["step"] == 7
        whole_job = sum(everywhere(sum(sizes)))
        if count > 1:
            assert total <= whole_job < 1.1 * total + 20_000, (count, whole_job, total)
        else:
            assert whole_job >= world * (total - own.nbytes)  # from the page cache
            assert sizes.shared == (len(names) if world > 1 else 0), everywhere(sizes.shared)


@case
def into_memory_of_every_kind(context: Context) -> None:
    path = context.folder / "c"
    value = whole("kinds", 40, 30)
    keys = ["strided", "every_second", "middle", "other", "prepended", "bends", "none", "cast"]
    keys.append("empty")
    around = {"every_second": torch.full((80, 30), -3.0), "middle": torch.full((60, 30), -3.0)}
    saved: dict[str, Any] = {key: entry(context, key, value.clone()) for key in keys[:-1]}
    saved["prepended"] = entry(context, "prepended", value.clone(), prepend_axis_num=0)
    saved["empty"] = entry(context, "empty", torch.empty(0, 3))
    dist_checkpointing.save(saved, path)

    def asked() -> dict[str, Any]:
        bent = torch.full((44, 28), -1.0)
        return {
            "strided": entry(context, "strided", torch.zeros(30, 40).t()),
            "every_second": entry(context, "every_second", around["every_second"][::2]),
            "middle": entry(context, "middle", around["middle"][10:50]),
            "other": entry(context, "other", torch.zeros(40, 30, requires_grad=True)),
            "prepended": entry(context, "prepended", torch.zeros(40, 30)),
            "bends": entry(context, "bends", bent, allow_shape_mismatch=True),
            "none": entry(context, "none", torch.zeros(40, 30)).without_data(),
            "cast": entry(context, "cast", torch.zeros(40, 30, dtype=torch.float64)),
            "empty": entry(context, "empty", torch.empty(0, 3)),
        }

    with on_nodes(context, context.world):
        loaded = dist_checkpointing.load(asked(), path, SHARING)
    for key in keys:
        if key == "bends":
            wanted = torch.zeros(44, 28)
            wanted[:40] = value[:, :28]
            assert torch.equal(loaded[key], wanted)
        elif key != "empty":
            assert torch.equal(loaded[key], value.to(loaded[key].dtype)), key
    assert torch.equal(around["every_second"][1::2], torch.full((40, 30), -3.0))
    for edge in (around["middle"][:10], around["middle"][50:]):
        assert torch.equal(edge, torch.full((10, 30), -3.0))
    assert loaded["other"].requires_grad is False and loaded["cast"].dtype == torch.float64


@case
def each_rank_says_for_itself_whether_another_shape_will_do(context: Context) -> None:
    path, last = context.folder / "c", context.rank == context.world - 1
    value = whole("w", 10)
    dist_checkpointing.save({"w": entry(context, "w", value.clone())}, path)
    wrapper = FullyParallelLoadStrategyWrapper(None, do_cache_distribution=True)

    def load(*sizes: int, bends: bool) -> torch.Tensor:
        asked = entry(context, "w", torch.full(sizes, 7.0), allow_shape_mismatch=bends)
        loaded: torch.Tensor = dist_checkpointing.load({"w": asked}, path, wrapper)["w"]
        return loaded

    with on_nodes(context, context.world):
        for bends in (False, not last) if context.world == 1 else (False, not last, last):
            raised(lambda bends=bends: load(16, bends=bends), "'w'", "stored with shape [10]")
        assert torch.equal(load(16, bends=True)[:10], value)  # which the next knows
        raised(lambda: load(16, bends=not last), f"rank {context.world - 1}", "shape [10]")
        assert torch.equal(load(10, bends=last), value)


@case
def ranks_read_within_groups(context: Context) -> None:
    """Groups of ranks on several nodes; what others ask for is theirs to read."""
    if context.world < 4:
        return
    path, rank = context.folder / "c", context.rank
    value = whole("w", 300, 5)
    dist_checkpointing.save({"w": entry(context, "w", value.clone())}, path)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrapper = FullyParallelLoadStrategyWrapper(None, groups[rank % 2])
    with on_nodes(context, 2) as sizes:
        loaded = dist_checkpointing.load(
            {"w": entry(context, "w", torch.zeros(300, 5))}, path, wrapper
        )
    assert torch.equal(loaded["w"], value)
    read = sum(everywhere(sum(sizes)))
    assert 2 * value.nbytes <= read < 2.2 * value.nbytes + 5000, read


@case
def who_reads_what_is_kept_while_nothing_changes(context: Context) -> None:
    rank, world = context.rank, context.world
    sharing = FullyParallelLoadStrategyWrapper(None, do_cache_distribution=True)
    looked: list[int] = []

    def check_layouts(layouts: Any, **options: bool) -> None:
        looked.append(len(layouts))
        return stock(layouts, **options)

    def state(value: float, count: int) -> dict[str, Any]:
        filled = (torch.full((40,), value + number) for number in range(count))
        return {str(n): entry(context, f"w{n}", each) for n, each in enumerate(filled)}

    def load(name: str, asked: int, **options: Any) -> bool:
        """Whether rank 0 has looked at all."""
        looked.clear()
        path = context.folder / name
        loaded = dist_checkpointing.load(state(-1.0, asked), path, sharing, **options)
        for n in range(min(asked, 5)):
            value = {"a": 1.0, "b": 2.0}[name] + n
            assert torch.equal(loaded[str(n)], torch.full((40,), value)), (name, n)
        assert len(loaded) == min(asked, 5)
        return bool(everywhere(len(looked))[0])

    dist_checkpointing.save(state(1.0, 5), context.folder / "a")
    dist_checkpointing.save(state(2.0, 5), context.folder / "b")
    stock = loading.check_layouts
    with mock.patch.object(loading, "check_layouts", check_layouts):
        with on_nodes(context, min(2, world)):
            assert load("a", 5)
            assert not load("a", 5)
            assert not load("b", 5)
            last = 4 if rank == world - 1 else 5
            assert load("b", last, validate_access_integrity=False)  # one rank asks for less
            assert not load("b", last, validate_access_integrity=False)
            assert load("b", 5, validate_access_integrity=False)
            unasked = {"strict": dist_checkpointing.validation.StrictHandling.LOG_UNEXPECTED}
            assert load("b", 6, **unasked)  # which are not in it
            assert not load("b", 6, **unasked)
            raised(lambda: load("b", 6), "Unexpected keys", "w5")
            raised(lambda: load("b", 6), "Unexpected keys", "w5")
        with on_nodes(context, world):  # who runs where, too
            assert load("b", 6, **unasked) == (world > 2)


Cells = dict[tuple[str, int, int], tuple[int, int, list[int]]]  # how a key is cut, who has it


def held(rank: int, cells: Cells, values: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        f"{key}.{row}.{column}": ShardedTensor.from_rank_offsets(
            key,
            values[key].chunk(rows)[row].chunk(columns, 1)[column].clone(),
            *((0, row, rows), (1, column, columns)),
            replica_id=ranks.index(rank),
        )
        for (key, row, column), (rows, columns, ranks) in cells.items()
        if rank in ranks
    }


@case
def random_layouts(context: Context) -> None:
    """Grids whose cells ranks have as it happens, with the main replicas spread over them."""
    for seed in range(12):
        chance = random.Random(seed)
        values: dict[str, torch.Tensor] = {}
        cells: Cells = {}
        for number in range(chance.randint(1, 4)):
            rows, columns = chance.randint(1, 3), chance.randint(1, 3)
            shape = (rows * chance.randint(1, 40), columns * chance.randint(1, 40))
            values[f"k{number}"] = whole(f"k{seed}.{number}", *shape)
            for row in range(rows):
                for column in range(columns):
                    ranks = chance.sample(range(context.world), chance.randint(1, context.world))
                    cells[f"k{number}", row, column] = (rows, columns, ranks)

        path = context.folder / str(seed)
        wanted = held(context.rank, cells, values)
        dist_checkpointing.save(wanted, path)
        asked = held(context.rank, cells, values)
        for each in asked.values():
            each.data.zero_()
        with on_nodes(context, chance.randint(1, context.world)):
            loaded = dist_checkpointing.load(asked, path, SHARING)
        assert loaded.keys() == wanted.keys()
        for name, each in wanted.items():
            assert torch.equal(loaded[name], each.data), (seed, name)


@case
def an_error_of_one_is_that_of_all(context: Context) -> None:
    path, last = context.folder / "c", context.rank == context.world - 1
    values = {f"w{number}": whole(f"w{number}", 100, 9) for number in range(8)}
    dist_checkpointing.save({k: entry(context, k, v.clone()) for k, v in values.items()}, path)

    def load() -> dict[str, Any]:
        asked = {key: entry(context, key, torch.zeros(100, 9)) for key in values}
        loaded: dict[str, Any] = dist_checkpointing.load(asked, path, SHARING)
        return loaded

    def broken(*_: Any) -> int:
        raise OSError(5, "no crc")

    if context.world == 1:
        return
    with on_nodes(context, context.world):
        for other in (broken, lambda _: 7):
            crc = other if last else operators.crc32c
            with mock.patch.object(operators, "crc32c", crc):
                raised(load, "no crc" if other is broken else "came otherwise than rank")
        loaded = load()
    assert all(torch.equal(loaded[key], value) for key, value in values.items())
