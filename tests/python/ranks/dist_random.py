"""Random states of torch_ckpt.megatron.dist_checkpointing: saved in one cut, loaded in another."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from ranks.run import Context, cases

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

CASES, case = cases()

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SEEDS = 16


class Whole:
    """A tensor as all ranks know it."""

    def __init__(self, chance: random.Random) -> None:
        self.prepended = chance.randint(0, 2)
        dims = self.prepended + chance.randint(0 if self.prepended else 1, 2)
        self.shape = tuple(chance.randint(1, 9) for _ in range(dims))
        self.dtype = chance.choice(DTYPES)

    def value(self) -> torch.Tensor:
        count = torch.Size(self.shape).numel()
        return torch.arange(count).view(self.shape).remainder(251).to(self.dtype)


def cut(chance: random.Random, whole: Whole, *, regular: bool) -> list[list[int]]:
    """Where each axis is cut, its ends among them. Boxes are 1 wide in axes that are prepended."""
    cuts = []
    for axis, size in enumerate(whole.shape):
        if axis < whole.prepended:
            cuts.append(list(range(size + 1)))
        elif regular:
            step = size // chance.choice([n for n in range(1, size + 1) if size % n == 0])
            cuts.append(list(range(0, size + 1, step)))
        else:
            inner = chance.sample(range(1, size), chance.randint(0, min(3, size - 1)))
            cuts.append([0, *sorted(inner), size])
    return cuts


def replica(chance: random.Random, rank: int, world: int) -> tuple[int, int] | None:
    """Of some of the ranks, as the same chance says on all of them; None where `rank` has none."""
    ranks = chance.sample(range(world), chance.randint(1, world))
    return (0, ranks.index(rank)) if rank in ranks else None


def boxes(
    chance: random.Random, at: Context, key: str, whole: Whole, *, regular: bool, filled: bool
) -> dict[str, ShardedTensor]:
    """Those that this rank has of a random cut."""
    spans = [list(itertools.pairwise(axis)) for axis in cut(chance, whole, regular=regular)]
    found = {}
    for box in itertools.product(*spans):
        replica_id = replica(chance, at.rank, at.world)
        if replica_id is None:
            continue
        part = whole.value()[tuple(slice(begin, end) for begin, end in box)]
        data = part.reshape(part.shape[whole.prepended :]).clone()
        found[f"{key}{box}"] = ShardedTensor(
            key,
            data if filled else torch.zeros_like(data),
            whole.dtype,
            tuple(data.shape),
            whole.shape,
            tuple(begin for begin, _ in box),
            tuple(len(span) for span in spans) if regular else None,
            replica_id,
            whole.prepended,
        )
    return found


def objects(chance: random.Random, at: Context, count: int) -> dict[str, ShardedObject]:
    found = {}
    for place in range(count):
        replica_id = replica(chance, at.rank, at.world)
        if replica_id is not None:
            value = {"place": place}
            found[f"o{place}"] = ShardedObject("o", value, (count,), (place,), replica_id)
    return found


@case
def one_cut_to_another(context: Context) -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed * 100 + context.world)
        wholes = {f"t{number}": Whole(chance) for number in range(chance.randint(1, 4))}
        cells = chance.randint(1, 5)
        shared = chance.random() < 0.5, chance.random() < 0.5
        saved: dict[str, Any] = {"step": seed, **objects(chance, context, cells)}
        for key, whole in wholes.items():
            regular = chance.random() < 0.5
            saved.update(boxes(chance, context, key, whole, regular=regular, filled=True))
        path = context.folder / str(seed)
        save_by = FullyParallelSaveStrategyWrapper(None) if shared[0] else None
        dist_checkpointing.save(saved, path, save_by)

        state = chance.getstate()
        requests = []
        for filled in (False, True):  # the same twice: what is asked for, and what is expected
            chance.setstate(state)
            requests.append(objects(chance, context, cells))
            for key, whole in wholes.items():
                requests[-1] |= boxes(chance, context, key, whole, regular=False, filled=filled)
        load_by = FullyParallelLoadStrategyWrapper(None) if shared[1] else None
        loaded = dist_checkpointing.load(requests[0], path, load_by)
        assert loaded.pop("step") == seed
        assert loaded.keys() == requests[1].keys(), seed
        for name, entry in requests[1].items():
            same = torch.equal if isinstance(entry, ShardedTensor) else dict.__eq__
            assert same(loaded[name], entry.data), (seed, name)
        plain = dist_checkpointing.load_plain_tensors(path)
        for key, whole in wholes.items():
            assert torch.equal(plain[key], whole.value()), (seed, key)
