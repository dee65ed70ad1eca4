"""Which tensors of a final save the ranks of a node write together, and which the coordinator
gathers: what is decided from their plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt.dcp.node import Node
from torch_ckpt.dcp.plan.global_plan import dedup_plans
from torch_ckpt.dcp.plan.rings import MIN_ROW_BYTES, Band, RankNote, note_of, short_rows
from torch_ckpt.dcp.write.final_layout import final_tensors
from torch_ckpt.dcp.write.layouts import Layout, Layouts

Shape = tuple[int, ...]
LAYOUTS = Layouts(Layout(final=True))
NODES = [Node("boot", "net", 0), Node("other boot", "net", 0)]


def item(
    fqn: str, shape: Shape, offsets: Shape, sizes: Shape, dtype: torch.dtype = torch.uint8
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, data)


def bands_in(answer: dict[str, Any]) -> list[list[Band]]:
    """Of each tensor, as `final_tensors` says it."""
    return [answer["kinds"][number][2] for number in answer["kind_of"]]


def bands(
    tensors: dict[str, list[tuple[Shape, Shape]]], nodes: Sequence[Node | None]
) -> dict[str, list[Band]]:
    """What `final_tensors` says of tensors that are given by each rank's (offsets, sizes)."""
    plans = []
    for rank, node in enumerate(nodes):
        items = []
        for fqn, boxes in tensors.items():
            ends = [[a + b for a, b in zip(*box, strict=True)] for box in boxes]
            shape = tuple(map(max, zip(*ends, strict=True)))
            items.append(item(fqn, shape, *boxes[rank]))
        plans.append(SavePlan(items, storage_data=RankNote(node)))
    answer = final_tensors(plans, LAYOUTS)
    return dict(zip(tensors, bands_in(answer), strict=True))


def rows(size: int) -> list[tuple[Shape, Shape]]:
    return [((0,), (size,)), ((size,), (size,))]


def columns(width: int) -> list[tuple[Shape, Shape]]:
    return [((0, 0), (8, width)), ((0, width), (8, width))]


ONE_NODE = [NODES[0], NODES[0]]


def test_short_rows_are_written_together_on_a_node_and_gathered_elsewhere() -> None:
    tensors = {"short": columns(100), "long": columns(MIN_ROW_BYTES), "rows": rows(1 << 20)}
    assert bands(tensors, ONE_NODE) == {"short": [(0, 0, 8)], "long": [], "rows": []}
    for nodes in ([NODES[0], NODES[1]], [NODES[0], None], [None, None]):
        assert bands(tensors, nodes) == {"short": [(-1, 0, 8)], "long": [], "rows": []}


def test_what_a_node_has_is_written_there() -> None:
    """Two nodes of two ranks: rows over the nodes, columns on them."""
    grid = [((r, c), (4, 50)) for r in (0, 4) for c in (0, 50)]
    turned = [((r, c), (4, 50)) for c in (0, 50) for r in (0, 4)]
    nodes = [NODES[0], NODES[0], NODES[1], NODES[1]]
    assert bands({"grid": grid}, nodes) == {"grid": [(0, 0, 4), (1, 4, 8)]}
    assert bands({"turned": turned}, nodes) == {"turned": [(-1, 0, 8)]}
    # A rank that does not say where it is has a band of its own, and no ring.
    assert bands({"grid": grid}, [NODES[0], NODES[0], None, None]) == {"grid": [(-1, 0, 8)]}
    assert bands({"grid": [*grid[:2], ((4, 0), (4, 100))]}, [NODES[0], NODES[0], None]) == {
        "grid": [(0, 0, 4), (-1, 4, 8)]
    }


def test_small_tensors_are_written_together_where_that_makes_rows_longer() -> None:
    quarter = MIN_ROW_BYTES // 4
    all_of_it = [(0, 0, 2 * quarter)]
    tensors = {"a": rows(quarter), "b": rows(1 << 20), "c": rows(quarter), "d": rows(quarter)}
    assert bands(tensors, ONE_NODE) == {"a": [], "b": [], "c": all_of_it, "d": all_of_it}
    # Beside columns, which are written so in any case.
    tensors = {"a": rows(4), "b": columns(quarter // 4), "c": rows(1 << 20), "d": rows(4)}
    assert bands(tensors, ONE_NODE) == {"a": [(0, 0, 8)], "b": [(0, 0, 8)], "c": [], "d": []}
    # Elsewhere their ranks write them by themselves.
    assert bands(tensors, [NODES[0], NODES[1]]) == {"a": [], "b": [(-1, 0, 8)], "c": [], "d": []}


@pytest.mark.parametrize("part", [MIN_ROW_BYTES // 2, MIN_ROW_BYTES // 4])
def test_rows_of_a_node_are_written_together_if_they_are_long(part: int) -> None:
    of_four = [((i * part,), (part,)) for i in range(4)]
    nodes = [NODES[0], NODES[0], NODES[1], NODES[1]]
    long = [(0, 0, 2 * part), (1, 2 * part, 4 * part)]
    assert bands({"t": of_four}, nodes)["t"] == (long if 2 * part >= MIN_ROW_BYTES else [])


def test_replicas_of_a_tensor_are_taken_from_one_node() -> None:
    nodes = [NODES[0], NODES[0], NODES[1], NODES[1]]
    names = [f"t{number}" for number in range(8)]
    plans = [
        SavePlan(
            [item(name, (8, 100), (0, 50 * (rank % 2)), (8, 50)) for name in names],
            storage_data=RankNote(node),
        )
        for rank, node in enumerate(nodes)
    ]
    chosen = dedup_plans(plans, False)
    assert [len(plan.items) for plan in chosen] == [4, 4, 4, 4]  # the work is shared all the same
    answer = final_tensors(chosen, LAYOUTS)
    assert answer["rings"] == [[0, 1], [2, 3]]
    assert sorted(band for [band] in bands_in(answer)) == [(0, 0, 8)] * 4 + [(1, 0, 8)] * 4


def test_replicas_on_several_nodes_are_taken_from_few() -> None:
    """Two replicas of two nodes each, rows over the nodes of a replica, columns on them. A tensor
    that all have makes the ranks' loads differ."""
    nodes = [Node("boot", name, 0) for name in "ABCD" for _ in range(2)]
    plans = []
    for rank, node in enumerate(nodes):
        items = [item("all", (1 << 20,), (0,), (1 << 20,))]
        place = (4 * (rank // 2 % 2), 50 * (rank % 2))
        items += [item(f"t{number}", (8, 100), place, (4, 50)) for number in range(9)]
        names = [each.index.fqn for each in items]
        plans.append(SavePlan(items, storage_data=RankNote(node, names)))
    of_all, *of_others = bands_in(final_tensors(dedup_plans(plans, False), LAYOUTS))
    assert of_all == []
    for own in of_others:
        assert [band[1:] for band in own] == [(0, 4), (4, 8)]
        assert all(ring >= 0 for ring, _, _ in own)


def test_who_has_nothing_for_a_ring_is_no_member_of_it() -> None:
    """Rows of 6 KiB of all, too short a band of either node; and one tensor of two of them."""
    part = MIN_ROW_BYTES // 32
    nodes = [NODES[rank // 4] for rank in range(8)]
    plans = [
        SavePlan([item("rows", (8 * part,), (rank * part,), (part,))], storage_data=RankNote(node))
        for rank, node in enumerate(nodes)
    ]
    gate = (MIN_ROW_BYTES,)
    for rank in range(2):
        half = MIN_ROW_BYTES // 2
        plans[rank].items.append(item("gate", gate, (rank * half,), (half,)))
    answer = final_tensors(plans, LAYOUTS)
    assert answer["rings"] == [[0, 1]]
    assert bands_in(answer) == [[], [(0, 0, MIN_ROW_BYTES)]]


@pytest.mark.parametrize(
    ("height", "rings", "of_columns"), [(1, [], []), (900, [[0, 1]], [(0, 0, 900)])]
)
def test_empty_boxes_count_nowhere(
    height: int, rings: list[list[int]], of_columns: list[Band]
) -> None:
    """Stock's planners have one where a rank has nothing, at the tensor's end."""
    columns, long = (height, 100), (9, 1 << 20)
    end = (height, 0)
    boxes = [((0, 0), (height, 50)), ((0, 50), (height, 50)), (end, (0, 50)), (end, (0, 50))]
    plans = [
        SavePlan(
            [item("columns", columns, *box), item("long", long, (0, 0), (0, 5))],
            storage_data=RankNote(NODES[rank // 2]),
        )
        for rank, box in enumerate(boxes)
    ]
    plans[3].items.append(item("long", long, (0, 0), long))
    answer = final_tensors(plans, LAYOUTS)
    assert answer["rings"] == rings
    assert bands_in(answer) == [of_columns, []]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_rows_of_packed_elements() -> None:
    packed = torch.float4_e2m1fn_x2
    half = MIN_ROW_BYTES // 2
    plans = [
        SavePlan(
            [
                item("flat", (2 * half,), (rank * half,), (half,), packed),
                item("columns", (8, 100), (0, 50 * rank), (8, 50), packed),
            ],
            storage_data=RankNote(NODES[0]),
        )
        for rank in range(2)
    ]
    answer = final_tensors(plans, LAYOUTS)
    assert [answer["kinds"][number][1] for number in answer["kind_of"]] == [[4 * half], [8, 200]]
    assert bands_in(answer) == [[(0, 0, 4 * half)], [(0, 0, 8)]]


def random_plans(chance: random.Random) -> list[SavePlan]:
    """Grids over some of the ranks, in their order or not, on nodes of any size."""
    world = chance.randint(1, 12)
    count = chance.randint(1, 4)
    plans = []
    for _ in range(world):
        node = chance.randrange(count)
        note = RankNote(Node("boot", str(node), 0) if node else None)
        plans.append(SavePlan([], storage_data=note))
    for number in range(chance.randint(1, 8)):
        rows, columns = chance.randint(1, 4), chance.randint(1, 4)
        ranks = chance.choices(range(world), k=rows * columns)
        if chance.random() < 0.5:
            ranks.sort()
        height, width = chance.choice([1, 3, 5000]), chance.choice([1, 100, 70_000])
        for place, rank in enumerate(ranks):
            offsets = (place // columns * height, place % columns * width)
            box = item(f"t{number}", (rows * height, columns * width), offsets, (height, width))
            plans[rank].items.append(box)
    return plans


@pytest.mark.parametrize("seed", range(200))
def test_members_of_rings_are_those_who_have_something_for_them(seed: int) -> None:
    plans = random_plans(random.Random(seed))
    answer = final_tensors(plans, LAYOUTS)
    names = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    bands = dict(zip(names, bands_in(answer), strict=True))
    members: list[set[int]] = [set() for _ in answer["rings"]]
    for rank, plan in enumerate(plans):
        for box in plan.items:
            data = box.tensor_data
            assert data is not None
            begin = data.chunk.offsets[0]
            end = begin + data.chunk.sizes[0]
            touched = [band for band in bands[box.index.fqn] if band[1] < end and begin < band[2]]
            assert len(touched) <= 1
            for ring, first, last in touched:
                assert first <= begin and end <= last  # no box is cut
                if ring >= 0:
                    members[ring].add(rank)
            if not touched:  # it writes this by itself
                assert short_rows(data) <= 1
    assert [set(ring) for ring in answer["rings"]] == members
    assert all(len(ring) > 1 for ring in answer["rings"])
    for ring in answer["rings"]:
        assert len({note_of(plans[rank]).node for rank in ring}) == 1
