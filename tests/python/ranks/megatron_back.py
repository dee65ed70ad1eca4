"""Megatron's own reading of checkpoints that were converted to its format, which test_megatron has
made."""

from __future__ import annotations

from typing import Any

import torch
from ranks.megatron import common_state, layer
from ranks.run import Context, cases

CASES, case = cases()


@case
def megatron_loads_it(at: Context) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    rank, world = at.rank, at.world
    place = ShardedTensor.from_rank_offsets
    for path in (at.shared / "back", at.shared / "again"):
        request: dict[str, Any] = {
            "weight": place("layer.weight", torch.zeros(4, 6), (0, rank, world)),
            "stacked": place(
                "decoder.layers.w",
                torch.zeros(3, 5, dtype=torch.bfloat16),
                (0, rank, world),
                prepend_axis_num=1,
            ),
            "bias": place("layer.bias", torch.zeros(5), replica_id=rank),
            "extra": ShardedObject("layer._extra_state", None, (world,), (rank,)),
        }
        loaded = dist_checkpointing.load(request, str(path))
        assert torch.equal(loaded["weight"], layer(rank))
        assert torch.equal(loaded["stacked"], torch.full((3, 5), rank + 0.5, dtype=torch.bfloat16))
        assert torch.equal(loaded["bias"], torch.arange(5.0))
        assert loaded["extra"] == {"rank": rank}
        common = common_state()
        assert loaded["args"] == common["args"] and loaded["iteration"] == 100
        assert loaded["optimizer"]["param_groups"] == common["optimizer"]["param_groups"]
        assert loaded["optimizer"]["step"] == common["optimizer"]["step"]
