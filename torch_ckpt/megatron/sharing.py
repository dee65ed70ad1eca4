"""Who writes which of the boxes that several ranks have: rank 0 says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_ckpt.megatron.boxes import Numbers
from torch_ckpt.megatron.sharding import BoxLayout, RankLayout
from torch_ckpt.planning.share import SharedBox, share_boxes

Part = tuple[str, Numbers, Numbers]  # key, offset, sizes


class Share(NamedTuple):
    """What a rank writes of the box at `place` of its layout: the rows from `begin` to `end`."""

    place: int
    begin: int
    end: int


def share_out(ranks: Sequence[RankLayout], sharers: Sequence[set[int]]) -> list[list[Share]]:
    """What each rank writes. Of boxes that are alike each row is written once, by a rank that has
    little to write (planning/share.py); none where no rank is their main replica.

    sharers: of each rank those that share with it: who has a part writes it only for a main replica
        among these.
    """
    held: dict[Part, dict[int, int]] = {}
    mains: dict[Part, int] = {}
    first: dict[Part, BoxLayout] = {}
    for rank, layout in enumerate(ranks):
        for place, box in enumerate(layout.boxes):
            part = (box.key, box.offset, box.sizes)
            if box.main:
                mains[part] = rank
            if box.held:
                held.setdefault(part, {}).setdefault(rank, place)
                first[part] = box
    held = {part: places for part, places in held.items() if part in mains}
    boxes = (
        SharedBox.of(
            tuple(rank for rank in places if mains[part] in sharers[rank]),
            part[0],
            first[part].sizes,
            first[part].dtype,
        )
        for part, places in held.items()
    )
    shares: list[list[Share]] = [[] for _ in ranks]
    for places, pieces in zip(held.values(), share_boxes(range(len(ranks)), boxes), strict=True):
        for rank, begin, end in pieces:
            shares[rank].append(Share(places[rank], begin, end))
    return [sorted(each) for each in shares]
