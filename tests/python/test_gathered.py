"""Which tensors of a final save the ranks of a node write together, and which the coordinator
gathers: what is decided from their plans."""

from __future__ import annotations

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
from torch_ckpt.dcp.rings import Node
from torch_ckpt.dtype_policy import DtypePolicy

Shape = tuple[int, ...]
NODES = [Node("boot", "net", 0), Node("other boot", "net", 0)]


def item(fqn: str, shape: Shape, offsets: Shape, sizes: Shape) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, data)


def gathered(
    tensors: dict[str, list[tuple[Shape, Shape]]], nodes: list[Node | None]
) -> dict[str, int]:
    """What `final_tensors` says of tensors that are given by each rank's (offsets, sizes)."""
    plans = []
    for rank, node in enumerate(nodes):
        items = []
        for fqn, boxes in tensors.items():
            shape = tuple(map(max, *([a + b for a, b in zip(*box, strict=True)] for box in boxes)))
            items.append(item(fqn, shape, *boxes[rank]))
        plans.append(SavePlan(items, storage_data=node))
    answer = final_tensors(plans, DtypePolicy())
    return dict(zip(tensors, answer["gathered"], strict=True))


def rows(size: int) -> list[tuple[Shape, Shape]]:
    return [((0,), (size,)), ((size,), (size,))]


def columns(width: int) -> list[tuple[Shape, Shape]]:
    return [((0, 0), (8, width)), ((0, width), (8, width))]


ONE_NODE = [NODES[0], NODES[0]]


def test_short_rows_are_written_together_on_a_node_and_gathered_elsewhere() -> None:
    tensors = {"short": columns(100), "long": columns(MIN_ROW_BYTES), "rows": rows(1 << 20)}
    assert gathered(tensors, [*ONE_NODE]) == {"short": 0, "long": -2, "rows": -2}
    for nodes in ([NODES[0], NODES[1]], [NODES[0], None], [None, None]):
        assert gathered(tensors, nodes) == {"short": -1, "long": -2, "rows": -2}


def test_small_tensors_are_written_together_where_that_makes_rows_longer() -> None:
    half = MIN_ROW_BYTES // 4  # of a rank, of a tensor with half of the bytes
    tensors = {"a": rows(half), "b": rows(1 << 20), "c": rows(half), "d": rows(half)}
    assert gathered(tensors, [*ONE_NODE]) == {"a": -2, "b": -2, "c": 0, "d": 0}
    # Beside columns, which are written so in any case.
    tensors = {"a": rows(4), "b": columns(MIN_ROW_BYTES // 16), "c": rows(1 << 20), "d": rows(4)}
    assert gathered(tensors, [*ONE_NODE]) == {"a": 0, "b": 0, "c": -2, "d": -2}
    # Elsewhere their ranks write them by themselves.
    assert gathered(tensors, [NODES[0], NODES[1]]) == {"a": -2, "b": -1, "c": -2, "d": -2}
