"""Who writes and who reads what of Megatron's state dicts, of ranks that are simulated."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.megatron.deliveries import Asked, plan_reads
from torch_ckpt.megatron.sharding import BoxLayout, RankLayout, check_layouts, check_stored
from torch_ckpt.megatron.sharing import share_out
from torch_ckpt.planning.share import outermost

MIB = 1 << 20


def rows_of(box: BoxLayout) -> int:
    return max(1, box.sizes[outermost(box.sizes)])


def part(
    key: str, shape: tuple[int, ...], at: int, of: int, *, main: bool, axis: int = 0
) -> BoxLayout:
    """Part `at` of `of` along an axis."""
    sizes, offset, grid = [*shape], [0] * len(shape), [1] * len(shape)
    sizes[axis] //= of
    offset[axis] = at * sizes[axis]
    grid[axis] = of
    return BoxLayout(
        *(key, torch.float32, shape, tuple(offset), tuple(sizes), tuple(grid), main, True)
    )


def written(ranks: Sequence[RankLayout], sharers: Sequence[set[int]]) -> list[int]:
    """Bytes that each rank writes, of which each element is written once."""
    counts: dict[tuple[str, tuple[int, ...]], collections.Counter[int]] = {}
    loads = [0] * len(ranks)
    for rank, shares in enumerate(share_out(ranks, sharers)):
        for place, begin, end in shares:
            box = ranks[rank].boxes[place]
            assert 0 <= begin < end <= rows_of(box) and box.held
            counts.setdefault((box.key, box.offset), collections.Counter()).update(
                range(begin, end)
            )
            loads[rank] += 4 * box.elements * (end - begin) // rows_of(box)
    due = {
        (box.key, box.offset): rows_of(box)
        for layout in ranks
        for box in layout.boxes
        if box.main and box.elements
    }
    assert counts.keys() >= due.keys()
    for part_, rows in due.items():
        assert counts[part_] == collections.Counter(range(rows)), part_
    return loads


def gpt(tp: int, pp: int, dp: int, layers: int, width: int) -> list[RankLayout]:
    """Ranks in the order of Megatron's, TP first, DP last."""
    ranks = []
    for rank in range(tp * pp * dp):
        place, stage, replica = rank % tp, rank // tp % pp, rank // tp // pp
        boxes = []
        for layer in range(stage * layers // pp, (stage + 1) * layers // pp):
            for name, shape, axis in (
                ("qkv", (3 * width, width), 0),
                ("proj", (width, width), 1),
                ("fc1", (4 * width, width), 0),
                ("fc2", (width, 4 * width), 1),
            ):
                key = f"{layer}.{name}"
                boxes.append(part(key, shape, place, tp, main=replica == 0, axis=axis))
            main = replica == 0 and place == 0
            boxes.append(part(f"{layer}.norm", (width,), 0, 1, main=main))
        if stage == 0:
            boxes.append(part("embedding", (8 * width, width), place, tp, main=replica == 0))
        ranks.append(RankLayout(boxes, []))
    return ranks


@pytest.mark.parametrize(("tp", "pp", "dp"), [(8, 8, 16), (2, 4, 8)])
def test_no_rank_writes_much_more_than_another(tp: int, pp: int, dp: int) -> None:
    """1,024 ranks, and 64."""
    ranks = gpt(tp, pp, dp, layers=2 * pp, width=1024)
    check_layouts(ranks, whole=True, replicas=True)
    check_stored(ranks)
    step = tp * pp
    groups = [set(range(first, tp * pp * dp, step)) for first in range(step)]
    loads = written(ranks, [groups[rank % step] for rank in range(len(ranks))])
    for group in groups:
        of_group = [loads[rank] for rank in group]
        mean = sum(of_group) / len(of_group)
        assert max(of_group) <= mean + max(MIB, mean / 64) + 16384, (max(of_group), mean)
    together = written(ranks, [set(range(len(ranks)))] * len(ranks))
    assert max(together) <= max(loads)


@given(st.integers(0, 2**32))
def test_each_row_is_written_once(seed: int) -> None:
    chance = random.Random(seed)
    world = chance.randint(1, 9)
    ranks: list[list[BoxLayout]] = [[] for _ in range(world)]
    for number in range(chance.randint(1, 6)):
        axis, of = chance.randint(0, 1), chance.randint(1, 4)
        shape = [chance.choice([1, 7, 300]), chance.choice([1, 5, 4096])]
        shape[axis] *= of
        for at in range(of):
            holders = chance.sample(range(world), chance.randint(1, world))
            for rank in holders:
                main = rank == holders[0]
                ranks[rank].append(
                    part(f"k{number}", (shape[0], shape[1]), at, of, main=main, axis=axis)
                )
    cut = chance.randint(1, world)
    groups = [set(range(cut)), set(range(cut, world))]
    for sharers in (
        [set(range(world))] * world,
        [{rank} for rank in range(world)],
        [next(group for group in groups if rank in group) for rank in range(world)],
    ):
        layouts = [RankLayout(boxes, []) for boxes in ranks]
        check_layouts(layouts, whole=True, replicas=True)
        written(layouts, sharers)


@pytest.mark.parametrize(("nodes", "beside"), [((0, 0), {0}), ((0, 1), set())])
def test_what_two_ranks_of_a_node_ask_for_is_read_from_the_page_cache(
    nodes: tuple[int, int], beside: set[int]
) -> None:
    """Of columns the engine tells, which knows how they are stored: each rank's own may be apart,
    and go past the cache."""
    for world, expected in ((1, beside), (2, set())):
        boxes = [part("w", (8, 6), rank % world, world, main=True, axis=1) for rank in range(2)]
        asked = [
            Asked(RankLayout([box], []), node, None) for box, node in zip(boxes, nodes, strict=True)
        ]
        assert [each.beside for each in plan_reads(asked)] == [expected] * 2


@given(st.integers(0, 2**32))
def test_each_row_is_read_or_sent_once(seed: int) -> None:
    """To every rank that asks for it, and read once for ranks that read together."""
    chance = random.Random(seed)
    world = chance.randint(1, 9)
    nodes = [chance.randint(0, 3) for _ in range(world)]
    cut = chance.randint(0, world)
    readers = [
        chance.choice([None, frozenset(range(cut)) if rank < cut else frozenset(range(cut, world))])
        for rank in range(world)
    ]
    ranks: list[list[BoxLayout]] = [[] for _ in range(world)]
    for number in range(chance.randint(1, 6)):
        of = chance.randint(1, 3)
        shape = (of * chance.choice([1, 400]), chance.choice([0, 3, 4096]))
        for at in range(of):
            for rank in chance.sample(range(world), chance.randint(1, world)):
                ranks[rank].append(part(f"k{number}", shape, at, of, main=False))
    asked = [
        Asked(RankLayout(boxes, []), node, of_rank)
        for boxes, node, of_rank in zip(ranks, nodes, readers, strict=True)
    ]
    reads = plan_reads(asked)
    given_: dict[tuple[int, int], list[object]] = collections.defaultdict(list)
    read: dict[object, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for rank, of_rank in enumerate(reads):
        for share, others in of_rank.gives:
            box = ranks[rank][share.place]
            read[box.key, box.offset, readers[rank]].update(range(share.begin, share.end))
            for other in others:
                assert other != rank and readers[other] == readers[rank]
                given_[rank, other].append((box.key, box.offset, share.begin, share.end))
    for counter in read.values():
        assert set(counter.values()) == {1}
    for rank, of_rank in enumerate(reads):
        covered: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for share, _ in of_rank.gives:
            covered[share.place].update(range(share.begin, share.end))
        expected: dict[int, list[object]] = collections.defaultdict(list)
        for share, source in of_rank.takes:
            covered[share.place].update(range(share.begin, share.end))
            box = ranks[rank][share.place]
            expected[source].append((box.key, box.offset, share.begin, share.end))
        for source, parts in expected.items():
            assert given_[source, rank] == parts  # in one order
        for place, rows in covered.items():
            assert rows == collections.Counter(range(rows_of(ranks[rank][place])))
            assert place not in of_rank.beside
        for place, box in enumerate(ranks[rank]):
            others = [
                other
                for other in range(world)
                if other != rank
                and any((b.key, b.offset) == (box.key, box.offset) for b in ranks[other])
            ]
            if place in covered or not math.prod(box.sizes):
                continue
            assert (place in of_rank.beside) == any(nodes[o] == nodes[rank] for o in others)
            together = [o for o in others if readers[o] == readers[rank] is not None]
            assert all(nodes[other] == nodes[rank] for other in together)
