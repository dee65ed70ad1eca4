"""Which tensors of a final save the ranks of a node write together, and which the coordinator
gathers: what is decided from their plans."""

from __future__ import annotations

from collections.abc import Sequence

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

from torch_ckpt.dcp.final_layout import MIN_ROW_BYTES, final_tensors
from torch_ckpt.dcp.global_plan import dedup_plans
from torch_ckpt.dcp.rings import Band, Node
from torch_ckpt.dtype_policy import DtypePolicy

Shape = tuple[int, ...]
NODES = [Node("boot", "net", 0), Node("other boot", "net", 0)]


def item(fqn: str, shape: Shape, offsets: Shape, sizes: Shape) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, data)


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
        plans.append(SavePlan(items, storage_data=node))
    answer = final_tensors(plans, DtypePolicy())
    return dict(zip(tensors, answer["bands"], strict=True))


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
            storage_data=node,
        )
        for rank, node in enumerate(nodes)
    ]
    chosen = dedup_plans(plans, False)
    assert [len(plan.items) for plan in chosen] == [4, 4, 4, 4]  # the work is shared all the same
    answer = final_tensors(chosen, DtypePolicy())
    assert answer["rings"] == [[0, 1], [2, 3]]
    assert sorted(band for [band] in answer["bands"]) == [(0, 0, 8)] * 4 + [(1, 0, 8)] * 4
