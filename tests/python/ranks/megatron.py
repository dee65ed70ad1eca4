"""Checkpoints that Megatron Core's dist_checkpointing saves, which test_megatron reads."""

from __future__ import annotations

import argparse
import multiprocessing
import random
from typing import Any

import torch
from ranks.run import Context, cases

CASES, case = cases()


def common_state() -> dict[str, Any]:
    return {
        "iteration": 100,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16, name=None),
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "step": torch.tensor(7)},
        "empty": {},
    }


def layer(rank: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * rank


@case
def a_model_of_two_ranks(at: Context) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    # Megatron waits for the GPU, and agrees on one; here there is none.
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    rank, world = at.rank, at.world
    place = ShardedTensor.from_rank_offsets
    state = {
        **common_state(),
        "model": {
            "weight": place("layer.weight", layer(rank), (0, rank, world)),
            "stacked": place(
                "decoder.layers.w",
                torch.full((3, 5), rank + 0.5, dtype=torch.bfloat16),
                (0, rank, world),
                prepend_axis_num=1,
            ),
            "bias": place("layer.bias", torch.arange(5.0), replica_id=rank),
        },
        "extra": ShardedObject("layer._extra_state", {"rank": rank}, (world,), (rank,)),
        "rng": ShardedObject(
            "rng_state",
            {"random": random.getstate(), "torch": torch.get_rng_state()},
            (1,),
            (0,),
            replica_id=rank,
        ),
    }
    target = at.folder / "iter_0000100"
    target.mkdir(exist_ok=True)
    try:
        dist_checkpointing.save(state, str(target))
    finally:
        for child in multiprocessing.active_children():  # else nobody would, after an error
            child.kill()
