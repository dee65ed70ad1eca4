"""Who writes which of the boxes that several ranks have: rank 0 says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_ckpt.megatron.boxes import Numbers
from torch_ckpt.megatron.sharding import RankLayout
from torch_ckpt.planning.share import SharedBox, share_boxes

Part = tuple[str, Numbers, Numbers]  # key, offset, sizes


def share_out(ranks: Sequence[RankLayout], sharers: Sequence[set[int]]) -> list[list[int]]:
    """For each rank the places of the boxes in its layout that it writes. Of those that are alike
    one is written, by a rank that has little to write (planning/share.py); none where no rank is
    their main replica.

    sharers: of each rank those that share with it: who has a part writes it only for a main replica
        among these.
    """
    held: dict[Part, dict[int, int]] = {}
    mains: dict[Part, int] = {}
    bytes_of: dict[Part, int] = {}
    for rank, layout in enumerate(ranks):
        for place, box in enumerate(layout.boxes):
            part = (box.key, box.offset, box.sizes)
            if box.main:
                mains[part] = rank
            if box.held:
                held.setdefault(part, {}).setdefault(rank, place)
                bytes_of[part] = math.prod(box.sizes) * box.dtype.itemsize
    held = {part: places for part, places in held.items() if part in mains}
    boxes = (
        SharedBox(
            tuple(rank for rank in places if mains[part] in sharers[rank]),
            part[0],
            bytes_of[part],
        )
        for part, places in held.items()
    )
    chosen = share_boxes(range(len(ranks)), boxes)
    shares: list[list[int]] = [[] for _ in ranks]
    for places, rank in zip(held.values(), chosen, strict=True):
        shares[rank].append(places[rank])
    return [sorted(each) for each in shares]
