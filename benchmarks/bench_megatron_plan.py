"""Rows: what Megatron Core and ours do before the first byte is saved, for many simulated ranks, in
one process: is what all ranks have whole, and who writes what of it."""

from __future__ import annotations

import collections
import math
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import environment, rivals
from benchmarks.contender import Contender, Context, Figure, Role, Row, row
from benchmarks.program import Timing

TP, DP = 8, 8
RANKS = TP * DP
SHARDS = 100_000  # of all ranks together
MEGATRON, OURS, UNCHANGED = "Megatron Core", "ours", "ours, as in the last save"
PLAN = (
    Figure("seconds", "s", worst=True, compared=True),
    Figure("sent", "MB a rank sends", compared=True),
)
BALANCE = (Figure("balance", "most of mean", worst=True, compared=True), Figure("seconds", "s"))
Sharded = Any  # a ShardedTensor of Megatron Core


def why_not() -> str:
    """Why the rows cannot run here; empty if they can."""
    there = environment.version("megatron-core") != "not installed"
    return rivals.why_not_ours("LocalBoxes") if there else "megatron-core is not installed"


def entries(rank: int, tensors: int) -> list[Sharded]:
    """Tensors cut by TP, of which DP ranks have each part; without data."""
    from megatron.core.dist_checkpointing import ShardedTensor

    data = torch.empty(64, 32, device="meta")
    return [
        ShardedTensor.from_rank_offsets(
            f"decoder.layers.{number}.weight",
            data,
            (0, rank % TP, TP),
            replica_id=(0, 0, rank // TP),
        )
        for number in range(tensors)
    ]


def megatron_shares(ranks: Sequence[Sequence[Sharded]], groups: Sequence[Sequence[int]]) -> Any:
    """Who writes what, by Megatron's own rule, in each of `groups`: {(group, shard): rank}."""
    from megatron.core.dist_checkpointing.exchange_utils import distribute_shards_to_ranks
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

    chosen = {}
    for number, group in enumerate(groups):
        holders: dict[Any, list[int]] = collections.defaultdict(list)
        sizes, mains = {}, set()
        for place, rank in enumerate(group):
            for entry in ranks[rank]:
                shard = _sharded_tensor_shard_id(entry)
                holders[shard].append(place)
                sizes[shard] = bytes_of(entry)
                if is_main_replica(entry.replica_id):
                    mains.add(shard)
        holders = {shard: places for shard, places in holders.items() if shard in mains}
        found = distribute_shards_to_ranks(holders, sizes, len(group), set())
        chosen.update({(number, shard): group[place] for shard, place in found.items()})
    return chosen


def bytes_of(entry: Sharded) -> int:
    """Of a part."""
    return int(entry.dtype.itemsize * math.prod(entry.local_shape))


def our_layouts(ranks: Sequence[Sequence[Sharded]]) -> list[Any]:
    """What ours says of the same entries."""
    from torch_ckpt.megatron.boxes import Box
    from torch_ckpt.megatron.sharding import RankLayout

    layouts = [RankLayout.of(map(Box.of, each), []) for each in ranks]
    return [
        each._replace(boxes=[box._replace(held=True) for box in each.boxes]) for each in layouts
    ]


def timed(work: Callable[[], dict[str, float]]) -> Timing:
    """What `work` takes, and the figures that it returns."""
    start, cpu = time.perf_counter(), time.process_time()
    figures = work()
    seconds = time.perf_counter() - start
    return Timing(seconds, time.process_time() - cpu, 1, figures={"seconds": seconds, **figures})


@row("megatron_plan", memory=("as-is",))
def megatron_plan(context: Context) -> Row:
    """64 ranks of 1,562 parts, 8 of which each time have the same: what rank 0 does."""
    tensors = max(1, round(SHARDS / RANKS * context.scale))
    state: dict[str, Any] = {}

    def make() -> None:
        if not state:
            ranks = [entries(rank, tensors) for rank in range(RANKS)]
            layouts = our_layouts(ranks)
            state["theirs"] = [pickle.dumps(each) for each in ranks]
            state["ours"] = [pickle.dumps(each) for each in layouts]
            state["layout"] = layouts[0]

    def theirs() -> dict[str, float]:
        from megatron.core.dist_checkpointing import validation

        # Each rank sends its part to all others, and each has all of them.
        ranks = [pickle.loads(message) for message in state["theirs"]]
        for of_key in _by_key(ranks).values():
            validation._validate_sharding_for_key(of_key)
        megatron_shares(ranks, [range(RANKS)])
        return {"sent": len(state["theirs"][0]) * (RANKS - 1) / 1e6}

    def ours() -> dict[str, float]:
        from torch_ckpt.megatron.sharding import check_layouts, check_stored
        from torch_ckpt.megatron.sharing import share_out
        from torch_ckpt.planning.collector import paused_gc

        with paused_gc(keeps=False):  # as saves do
            layouts = [pickle.loads(message) for message in state["ours"]]
            check_layouts(layouts, whole=True, replicas=True)
            check_stored(layouts)
            share_out(layouts, [set(range(RANKS))] * RANKS)
        return {"sent": len(state["ours"][0]) / 1e6}

    def unchanged() -> dict[str, float]:
        from torch_ckpt.megatron.agreed import digest_of

        digest = digest_of(state["layout"])
        return {"sent": len(pickle.dumps(("0" * 16, digest, digest))) / 1e6}

    def add(name: str, role: Role, work: Callable[[], dict[str, float]]) -> Contender:
        return Contender(name, role, lambda: timed(work), before=make, skip=why_not())

    return Row(
        f"Check and share out {SHARDS:,} parts of {RANKS} ranks, on rank 0",
        0,
        tensors,
        [
            add(MEGATRON, "rival", theirs),
            add(OURS, "ours", ours),
            add(UNCHANGED, "ours", unchanged),
        ],
        limit="",
        figures=PLAN,
    )


def _by_key(ranks: Sequence[Sequence[Sharded]]) -> dict[str, list[tuple[int, Sharded]]]:
    found: dict[str, list[tuple[int, Sharded]]] = collections.defaultdict(list)
    for rank, of_rank in enumerate(ranks):
        for entry in of_rank:
            found[entry.key].append((rank, entry))
    return found


def gpt_entries(rank: int, tensor_parallel: int, stages: int) -> list[Sharded]:
    """32 layers of a 7B GPT in `stages`, cut by TP, with 8 replicas; embeddings at both ends."""
    from megatron.core.dist_checkpointing import ShardedTensor

    tp, rest = rank % tensor_parallel, rank // tensor_parallel
    stage, replica = rest % stages, rest // stages
    layers = range(32 // stages * stage, 32 // stages * (stage + 1))
    shapes = {
        **{"qkv": (12288, 4096), "proj": (4096, 4096)},
        **{"fc1": (22016, 4096), "fc2": (4096, 11008)},
    }
    found = []

    def add(key: str, shape: tuple[int, ...], cut: bool) -> None:
        rows = shape[0] // tensor_parallel if cut else shape[0]
        data = torch.empty(rows, *shape[1:], dtype=torch.bfloat16, device="meta")
        offsets = [(0, tp, tensor_parallel)] if cut else []
        replicas = (0, 0 if cut else tp, replica)
        found.append(ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replicas))

    for layer in layers:
        for name, shape in shapes.items():
            add(f"layers.{layer}.{name}", shape, True)
        for name in ("norm", "post_norm"):
            add(f"layers.{layer}.{name}", (4096,), False)
    if stage == 0:
        add("embedding", (32000, 4096), True)
    if stage == stages - 1:
        add("output", (32000, 4096), True)
    return found


def _balance(loads: Sequence[float], groups: Sequence[Sequence[int]]) -> float:
    """The most that a rank of a group writes, of the mean there, in the worst group."""
    return max(
        max(loads[rank] for rank in group) / (sum(loads[rank] for rank in group) / len(group))
        for group in groups
    )


def _balance_row(tensor_parallel: int) -> Row:
    stages, replicas = 4, 8
    world = tensor_parallel * stages * replicas
    step = tensor_parallel * stages
    groups = [list(range(first, world, step)) for first in range(step)]
    state: dict[str, Any] = {}

    def make() -> None:
        if not state:
            ranks = [gpt_entries(rank, tensor_parallel, stages) for rank in range(world)]
            state.update(ranks=ranks, layouts=our_layouts(ranks))

    def theirs() -> dict[str, float]:
        chosen = megatron_shares(state["ranks"], groups)
        loads = [0.0] * world
        sizes = {
            (entry.key, entry.global_offset): bytes_of(entry)
            for of_rank in state["ranks"]
            for entry in of_rank
        }
        for (_, shard), rank in chosen.items():
            loads[rank] += sizes[shard[0], shard[1]]
        return {"balance": _balance(loads, groups)}

    def ours() -> dict[str, float]:
        from torch_ckpt.megatron.sharing import share_out
        from torch_ckpt.planning.share import outermost

        layouts = state["layouts"]
        sharers = [set(groups[rank % step]) for rank in range(world)]
        loads = [0.0] * world
        for rank, shares in enumerate(share_out(layouts, sharers)):
            for share in shares:
                box = layouts[rank].boxes[share.place]
                rows = box.sizes[outermost(box.sizes)]
                loads[rank] += box.elements * box.dtype.itemsize * (share.end - share.begin) / rows
        return {"balance": _balance(loads, groups)}

    def add(name: str, role: Role, work: Callable[[], dict[str, float]]) -> Contender:
        return Contender(name, role, lambda: timed(work), before=make, skip=why_not())

    return Row(
        f"Who writes what of a 7B GPT, {world} ranks, {replicas} replicas",
        0,
        0,
        [add(MEGATRON, "rival", theirs), add(OURS, "ours", ours)],
        limit="",
        figures=BALANCE,
    )


@row("megatron_balance_64", memory=("as-is",))
def megatron_balance_64(_: Context) -> Row:
    """TP 2, PP 4."""
    return _balance_row(2)


@row("megatron_balance_256", memory=("as-is",))
def megatron_balance_256(_: Context) -> Row:
    """TP 8, PP 4."""
    return _balance_row(8)
