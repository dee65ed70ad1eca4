"""The same calls of Megatron's own dist_checkpointing and of ours, and what comes of them."""

from __future__ import annotations

import multiprocessing
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from foreign_samples import same
from ranks.run import Context, cases
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.megatron import dist_checkpointing as ours

CASES, case = cases()
MODES = (
    *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
    *("return_unexpected", "return_all", "ignore_all"),
)


def megatron() -> Any:
    """Its package, without the GPU that it waits for and agrees on."""
    from megatron.core import dist_checkpointing

    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    return dist_checkpointing


def end_children() -> None:
    """Else nobody would, after an error. Megatron keeps one of them for its next save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    filesystem_async._results_queue = None


def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=generator)


def asked_of(theirs: Any, at: Context, filled: bool) -> dict[str, Any]:
    """What both are given, in Megatron's classes."""
    place = theirs.ShardedTensor.from_rank_offsets

    def of(name: str, *shape: int) -> torch.Tensor:
        return values(f"{name}{at.rank}", shape) if filled else torch.zeros(shape)

    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> dict[str, Any]:
        cut = {"replica_id": replica}
        return {
            "gate": place(f"{key}.gate", data[:2], (0, at.rank, at.world), **cut),
            "up": place(f"{key}.up", data[2:], (0, at.rank, at.world), **cut),
        }

    def merge(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts["gate"], parts["up"]])

    mapping = theirs.mapping
    return {
        "rows": place("rows", of("rows", 2, 3), (0, at.rank, at.world)),
        "norm": place(
            "norm", values("norm", (5,)) if filled else torch.zeros(5), replica_id=at.rank
        ),
        "deep": {
            "fc1": mapping.ShardedTensorFactory("fc1", of("fc1", 4, 2), build, merge),
            "stacked": place(
                "stacked", of("stacked", 3), (0, at.rank, at.world), prepend_axis_num=1
            ),
        },
        "rng": mapping.ShardedObject("rng", [at.rank] if filled else None, (at.world,), (at.rank,)),
        "step": 3 if filled else 0,
        "local": mapping.LocalNonpersistentObject({"rank": at.rank, "filled": filled}),
    }


def mismatches(theirs: Any, at: Context) -> dict[str, Callable[[dict[str, Any]], None]]:
    """What may be wrong with a request, on all ranks."""
    place = theirs.ShardedTensor.from_rank_offsets
    sharded_object = theirs.mapping.ShardedObject

    def more(state: dict[str, Any]) -> None:
        state["more"] = place("more", torch.zeros(2), (0, at.rank, at.world))

    def more_objects(state: dict[str, Any]) -> None:
        state["deep"]["more"] = sharded_object("more", None, (at.world,), (at.rank,))

    def less(state: dict[str, Any]) -> None:
        del state["rows"]

    def less_objects(state: dict[str, Any]) -> None:
        del state["rng"]

    def both(state: dict[str, Any]) -> None:
        more(state)
        less(state)

    def grown(bends: bool) -> Callable[[dict[str, Any]], None]:
        def grow(state: dict[str, Any]) -> None:
            options = {"replica_id": at.rank, "allow_shape_mismatch": bends}
            state["norm"] = place("norm", torch.ones(7), **options)

        return grow

    return {
        "nothing": lambda _: None,
        "more": more,
        "more objects": more_objects,
        "less": less,
        "less objects": less_objects,
        "both": both,
        "a factory less": lambda state: state["deep"].pop("fc1"),
        "another shape": grown(False),
        "another shape that may be": grown(True),
    }


def outcome(call: Callable[[], Any], errors: tuple[type[BaseException], ...]) -> Any:
    """What it returns; of an error, that."""
    try:
        return call()
    except errors:
        return "refused"


@case
def loads_with_all_flags_and_mismatches(at: Context) -> None:
    theirs = megatron()
    paths = [at.folder / name for name in ("theirs", "ours")]
    for path in paths:
        path.mkdir(exist_ok=True)
    try:
        theirs.save(asked_of(theirs, at, True), str(paths[0]))
    finally:
        end_children()
    ours.save(asked_of(theirs, at, True), paths[1])
    refused = (Exception, CheckpointException)  # theirs, of whatever layer it is
    wrong = []
    for what, spoil in mismatches(theirs, at).items():
        for strict in MODES:

            def load(package: Any, path: Path, spoil: Any = spoil, strict: str = strict) -> Any:
                state = asked_of(theirs, at, False)
                spoil(state)
                return package.load(state, str(path), strict=strict)

            expected = outcome(lambda: load(theirs, paths[0]), refused)  # noqa: B023
            for path in paths:
                found = outcome(lambda: load(ours, path), (ours.core.CheckpointingException,))  # noqa: B023
                if not same(found, expected):
                    wrong.append((what, strict, path.name, found, expected))
    assert not wrong, wrong[:3]


def random_state(theirs: Any, at: Context, seed: int, filled: bool) -> dict[str, Any]:
    """Of grids, replicas, prepended axes and common values, as the seed says."""
    chance = random.Random(seed)
    place = theirs.ShardedTensor.from_rank_offsets
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

    def entry(name: str) -> Any:
        kind = chance.choice(("cut", "alike", "stacked", "object", "value", "nested"))
        dtype = chance.choice(dtypes)
        shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        axis = chance.randrange(len(shape))
        value = chance.choice((1, "text", 2.5, None, (1, 2), [1, {"a": 2}], {}, [], torch.ones(2)))
        inner = chance.randint(1, 3)
        alike = kind == "alike"
        data = values(name if alike else f"{name}{at.rank}", tuple(shape)).mul(4).to(dtype)
        if not filled:
            data = torch.zeros_like(data)
        if kind == "cut":
            return place(name, data, (axis, at.rank, at.world))
        if alike:
            return place(name, data, replica_id=(0, at.rank))
        if kind == "stacked":
            return place(name, data, (0, at.rank, at.world), prepend_axis_num=1)
        if kind == "object":
            held = [name, value] if filled else None
            return theirs.mapping.ShardedObject(name, held, (1, at.world), (0, at.rank))
        if kind == "value":
            return value if filled else 0
        return {f"n{i}": entry(f"{name}.n{i}") for i in range(inner)}

    return {f"k{i}": entry(f"k{i}") for i in range(chance.randint(2, 6))}


@case
def random_states(at: Context) -> None:
    theirs = megatron()
    for seed in range(8):
        paths = [at.folder / f"{seed}.{name}" for name in ("theirs", "ours")]
        for path in paths:
            path.mkdir(exist_ok=True)
        try:
            theirs.save(random_state(theirs, at, seed, True), str(paths[0]))
        finally:
            end_children()
        ours.save(random_state(theirs, at, seed, True), paths[1])
        expected = theirs.load(random_state(theirs, at, seed, False), str(paths[0]))
        for path in paths:
            found = ours.load(random_state(theirs, at, seed, False), path)
            assert same(found, expected), (seed, path.name, found, expected)
