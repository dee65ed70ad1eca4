"""The coordinator's part of planning a save: who writes what, the metadata, and the proof that the
pieces of every tensor fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt.dcp.plan.items import ZEROS, ShareItem, WriteItems
from torch_ckpt.dcp.plan.rings import node_numbers, short_rows
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native.torch_private import validate_global_plan
from torch_ckpt.planning.share import BoxShare, SharedBox, outermost, share_boxes

MAX_CATALOG_BYTES = 1 << 30  # kMaxCatalogBytes in csrc/format/ours/catalog.h
_PLACE_BYTES = 1 + 4 + 6  # at most: kind, file, and an offset below 4 TiB
_MOST_BOX_BYTES = _PLACE_BYTES + 8 * 2 * 7  # of eight dimensions


def check_catalog_size(plans: list[SavePlan], limit: int = MAX_CATALOG_BYTES) -> None:
    """Raise UnsupportedError where the catalog of what is planned might be too large to be written
    (docs/format.md, section 6), before anything is."""
    if sum(len(plan.items) for plan in plans) * _MOST_BOX_BYTES <= limit // 2:
        return  # whatever the boxes are; and names are few beside that
    most = 0
    names = set()
    for plan in plans:
        for item in plan.items:
            names.add(item.index.fqn)
            most += _PLACE_BYTES
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                most += sum(_varint_bytes(n) for n in (*chunk.offsets, *chunk.sizes))
    # Of each its name, its path in the state dict, dtype and shape.
    most += sum(2 * len(name) + 64 for name in names)
    if most > limit:
        raise UnsupportedError(
            f"the catalog of what is planned could take {most} bytes, {limit} are allowed: "
            f"{len(names)} leaves are in too many boxes"
        )


def _varint_bytes(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7)


def dedup_plans(
    plans: list[SavePlan], to_lowest_rank: bool, differing: Collection[str] = ()
) -> list[SavePlan]:
    """Leave each item that several ranks offer with one of them.

    A tensor's box goes to a rank that has little to write (the lowest rank if `to_lowest_rank`), or
    in shares to several, see planning/share.py; an object and what is in `differing` to the lowest
    rank that offers it, so that which of several differing values is kept does not depend on sizes,
    and that they are of one rank. The boxes of a tensor in short rows stay on one node where plans
    say theirs (those for final files do), or on few: ranks of a node can write them together.
    """
    if len(plans) == 1:
        return plans
    holders: dict[tuple[str, Any], list[int]] = {}
    first: dict[tuple[str, Any], WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            index = item.index
            key = (index.fqn, index.offset)
            ranks = holders.get(key)
            if ranks is None:
                holders[key] = [rank]
                first[key] = item
            elif ranks[-1] != rank:
                ranks.append(rank)
                _check_replica(item, rank, first[key], ranks[0])
    chosen = {key: ranks[0] for key, ranks in holders.items()}
    cut: dict[tuple[str, Any], list[BoxShare]] = {}
    if not to_lowest_rank and any(len(ranks) > 1 for ranks in holders.values()):
        for key, shares in _shared_out(plans, holders, first, differing):
            chosen[key] = shares[0].rank
            if len(shares) > 1:
                cut[key] = shares

    def items_of(rank: int, plan: SavePlan) -> Iterator[WriteItem]:
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            if key in cut and item.tensor_data is not None:
                axis = outermost(item.tensor_data.chunk.sizes)
                for share in cut[key]:
                    if share.rank == rank:
                        yield ShareItem.of(item, axis, share.begin, share.end)
            elif chosen[key] == rank:
                yield item

    return [
        dataclasses.replace(plan, items=WriteItems(items_of(rank, plan)))
        for rank, plan in enumerate(plans)
    ]


def _shared_out(
    plans: list[SavePlan],
    holders: dict[tuple[str, Any], list[int]],
    first: dict[tuple[str, Any], WriteItem],
    differing: Collection[str],
) -> Iterator[tuple[tuple[str, Any], list[BoxShare]]]:
    """Who writes each tensor's box, by its key."""
    nodes = node_numbers(plans)
    several = 1 < len(set(nodes)) < len(nodes)  # nodes, with several ranks
    short: dict[int, bool] = {}  # by description
    boxes: dict[tuple[str, Any], SharedBox] = {}
    for key, ranks in holders.items():
        data = first[key].tensor_data
        if data is None:
            continue
        if id(data) not in short:
            short[id(data)] = several and short_rows(data) > 0
        held = (ranks[0],) if key[0] in differing else tuple(ranks)
        boxes[key] = SharedBox.of(
            held, key[0], data.chunk.sizes, data.properties.dtype, short[id(data)]
        )
    return zip(boxes, share_boxes(nodes, boxes.values()), strict=True)


def _check_replica(item: WriteItem, rank: int, other: WriteItem, other_rank: int) -> None:
    """Of what is at one place on two ranks one rank's is kept: they must at least be alike."""
    a, b = other.tensor_data, item.tensor_data
    if a is b:
        return
    if (
        a is None
        or b is None
        or a.size != b.size
        or a.chunk.sizes != b.chunk.sizes
        or a.properties.dtype != b.properties.dtype
    ):
        raise InvalidArgumentError(
            f"ranks {other_rank} and {rank} disagree: {_described(a)} and {_described(b)}",
            tensor=item.index.fqn,
        )


def _described(data: TensorWriteData | None) -> str:
    if data is None:
        return "no tensor"
    part = f"{list(data.chunk.sizes)} of " if data.chunk.sizes != data.size else ""
    return f"{data.properties.dtype} {part}{list(data.size)}"


def assemble(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Build the metadata of `plans` and give every shard its position among its tensor's chunks.

    Raises InvalidArgumentError where ranks disagree on a tensor, and ValueError where chunks
    overlap, leave the tensor or do not cover it.
    """
    entries: dict[str, Any] = {}
    to_prove: dict[str, TensorStorageMetadata] = {}
    # The entry of tensors in one piece, by the description that they share.
    whole: dict[int, TensorStorageMetadata] = {}
    new_plans = []
    for plan in plans:
        items = WriteItems()
        changed = False
        for item in plan.items:
            index = item.index
            fqn = index.fqn
            data = item.tensor_data
            entry = entries.get(fqn)
            if data is None:
                if entry is not None:
                    raise _twice(plans, fqn)
                entries[fqn] = BytesStorageMetadata()
                items.append(item)
                continue
            position = 0
            if entry is None:
                entry = whole.get(id(data))
                if entry is None:
                    chunk = data.chunk
                    entry = TensorStorageMetadata(data.properties, data.size, [chunk])
                    # One chunk that is the whole tensor proves itself.
                    if chunk.sizes != data.size or chunk.offsets != ZEROS[len(chunk.offsets)]:
                        to_prove[fqn] = entry
                    else:
                        whole[id(data)] = entry
                entries[fqn] = entry
            else:
                _check_same_tensor(plans, entry, item)
                if fqn not in to_prove:  # it is shared with tensors in one piece
                    entry = TensorStorageMetadata(entry.properties, entry.size, [*entry.chunks])
                    entries[fqn] = to_prove[fqn] = entry
                position = len(entry.chunks)
                entry.chunks.append(data.chunk)
            if index.index != position:
                index = MetadataIndex(fqn, index.offset, position)
                item = dataclasses.replace(item, index=index)
                changed = True
            items.append(item)
        new_plans.append(dataclasses.replace(plan, items=items) if changed else plan)
    if to_prove:
        _prove(new_plans, _share(entries, to_prove))
    return new_plans, Metadata(entries)


def _share(
    entries: dict[str, Any], tensors: dict[str, TensorStorageMetadata]
) -> dict[str, TensorStorageMetadata]:
    """Let those of `tensors` that consist of the same boxes have one entry; returns one of each."""
    first: dict[tuple[Any, ...], str] = {}
    for fqn, entry in tensors.items():
        alike = (entry.size, id(entry.properties), *map(id, entry.chunks))
        entries[fqn] = tensors[first.setdefault(alike, fqn)]
    return {fqn: tensors[fqn] for fqn in first.values()}


def _twice(plans: list[SavePlan], fqn: str) -> InvalidArgumentError:
    held = [
        f"{_described(item.tensor_data)} on rank {rank}"
        for rank, plan in enumerate(plans)
        for item in plan.items
        if item.index.fqn == fqn
    ]
    return InvalidArgumentError(
        f"ranks disagree, or plan it twice: {', '.join(held[:4])}", tensor=fqn
    )


def _check_same_tensor(plans: list[SavePlan], entry: Any, item: WriteItem) -> None:
    data = item.tensor_data
    if (
        data is None
        or item.type != WriteItemType.SHARD
        or not isinstance(entry, TensorStorageMetadata)
        or data.size != entry.size
        or data.properties.dtype != entry.properties.dtype
    ):
        raise _twice(plans, item.index.fqn)


def _prove(plans: list[SavePlan], tensors: dict[str, TensorStorageMetadata]) -> None:
    # list[str] of errors since torch 2.13, a bool (True: valid) before.
    errors: Any = validate_global_plan(plans, Metadata(dict(tensors)))
    if errors is True or errors == []:
        return
    summary = "; ".join(errors) if isinstance(errors, list) else "see the warnings logged above"
    if len(summary) > 500:
        summary = summary[:500] + "... (truncated)"
    raise ValueError(f"Failed to validate global plan: {summary}")
