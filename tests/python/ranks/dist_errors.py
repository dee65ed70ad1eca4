"""Bad input to torch_ckpt.megatron.dist_checkpointing on one rank is an error of all, and the old
checkpoint stays."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from ranks.run import Context, cases, everywhere, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

CASES, case = cases()


@case
def a_rank_whose_factory_fails_fails_all(context: Context) -> None:
    path, last = context.folder / "f", context.rank == context.world - 1

    def state(fails: bool) -> dict[str, Any]:
        def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)

        def merge(part: torch.Tensor) -> torch.Tensor:
            if fails:
                raise RuntimeError("no merge")
            return part

        return {"w": ShardedTensorFactory("w", torch.ones(2), build, merge, context.rank)}

    dist_checkpointing.save(state(False), path)
    raised(lambda: dist_checkpointing.load(state(last), path), "no merge")


@case
def boxes_that_are_not_each_once_are_errors_of_all(context: Context) -> None:
    rank, world, path = context.rank, context.world, context.folder / "c"
    dist_checkpointing.save({"step": 1}, path)

    def cut(**changed: Any) -> dict[str, Any]:
        given = {"offset": (rank, world), "replica": 0, "shape": (4, 2), "dtype": torch.float32}
        given.update(changed)
        data = torch.ones(given["shape"], dtype=given["dtype"])
        return {
            "w": ShardedTensor.from_rank_offsets(
                "w", data, (0, *given["offset"]), replica_id=given["replica"]
            )
        }

    last = rank == world - 1
    wrong = {
        "main replica": cut(offset=(0, world)),
        "hole": cut(replica=1 if last else 0),
        f"main replica of its box at [{4 * (world - 1)}, 0], which rank {world - 1} has": cut(
            replica=1 if last else 0
        ),
        f"no rank has its box at [{4 * world}, 0]": cut(offset=(rank, world + 1)),
        "disagree": cut(dtype=torch.float16 if last else torch.float32),
        "ranks 0 and": cut(shape=(5, 2) if last else (4, 2)),
        "boxes of any sizes": {
            "w": replace(cut()["w"], axis_fragmentations=None if last else (world, 1))
        },
        "which make": {"w": replace(cut()["w"], axis_fragmentations=(2 * world, 1))},
        "is a tensor on rank": (
            {"w": ShardedObject("w", 1, (1,), (0,), replica_id=rank)} if last else cut()
        ),
        "grid of": {"w": ShardedObject("w", 1, (world + 1 if last else world,), (rank,))},
        "are due": {"w": ShardedObject("w", 1, (world + 1,), (rank,))},
        f"no rank has its object at [{world}]": {"w": ShardedObject("w", 1, (world + 1,), (rank,))},
        f"its object at [{world - 1}], which rank {world - 1} has": {
            "w": ShardedObject("w", 1, (world,), (rank,), replica_id=1 if last else 0)
        },
        "its object at": {"w": ShardedObject("w", 1, (world,), (0,))},
    }
    if world == 1:
        wrong = {
            says: state
            for says, state in wrong.items()
            if says in ("hole", "which make", "are due") or says.startswith("no rank has")
        }
    for says, state in wrong.items():
        error = raised(lambda state=state: dist_checkpointing.save(state, path), says, "'w'")
        assert isinstance(error, CheckpointingException)
        assert dist_checkpointing.load_common_state_dict(path) == {"step": 1}
    error = raised(lambda: dist_checkpointing.save({"w": without_data(last)}, path), "no data")
    assert isinstance(error, CheckpointingException)
    # Without the count of replicas equal boxes are one, and a hole is a hole.
    dist_checkpointing.save(cut(offset=(0, 1), replica=0), path, validate_access_integrity=False)
    holed = cut(replica=1 if last else 0)
    unchecked = {"validate_access_integrity": False}
    raised(lambda: dist_checkpointing.save(holed, path, **unchecked), "hole", "'w'")
    lacking = {"w": ShardedObject("w", 1, (world + 1,), (rank,))}
    raised(lambda: dist_checkpointing.save(lacking, path, **unchecked), "are due", "'w'")
    if world == 1:
        return

    # As many elements as the tensor has, yet not each once.
    def lapping() -> dict[str, Any]:
        box = (torch.zeros(2, 2), torch.float32, (2, 2), (4, 2), (1 if last else 0, 0), None)
        return {"w": ShardedTensor("w", *box, replica_id=0 if last else rank)}

    said = ("'w'", "overlap", "on rank 0", f"on rank {world - 1}")
    for call in (
        lambda: dist_checkpointing.save(lapping(), path),
        lambda: dist_checkpointing.save(lapping(), path, **unchecked),
        lambda: dist_checkpointing.load(lapping(), path),
    ):
        assert isinstance(raised(call, *said), CheckpointingException)
    found = dist_checkpointing.load(lapping(), path, **unchecked)["w"]
    assert torch.equal(found, torch.ones(2, 2))


@case
def a_name_of_two_entries_is_an_error_of_all(context: Context) -> None:
    """A tensor under the key that an object has with its place, on another rank."""
    rank, last, path = context.rank, context.world - 1, context.folder / "c"
    dist_checkpointing.save({"step": 1}, path)
    state: dict[str, Any] = {}
    if rank == 0:
        state["t"] = ShardedTensor.from_rank_offsets("o/shard_1_2", torch.ones(2))
        state["first"] = ShardedObject("o", 1, (2,), (0,))
    if rank == last:
        state["o"] = ShardedObject("o", 1, (2,), (1,))
    said = ("'o/shard_1_2'", "is a tensor on rank 0", f"object on rank {last}")
    for call in (dist_checkpointing.save, dist_checkpointing.load):
        error = raised(lambda call=call: call(state, path), *said)
        assert isinstance(error, CheckpointingException)
    reserved = {}
    if rank == last:
        key = "common_state/shard_0_1"
        reserved["w"] = ShardedTensor.from_rank_offsets(key, torch.ones(2))
    error = raised(lambda: dist_checkpointing.save(reserved, path), f"rank {last}", "reserved")
    assert isinstance(error, CheckpointingException)
    assert dist_checkpointing.load_common_state_dict(path) == {"step": 1}


class Unstorable:
    """Nothing says what it is."""


@case
def an_unstorable_value_of_one_rank_is_an_error_of_all(context: Context) -> None:
    last, path = context.rank == context.world - 1, context.folder / "c"
    dist_checkpointing.save({"step": 1}, path)
    value = Unstorable() if last else 1
    own = ShardedObject("o", [value], (context.world,), (context.rank,))
    common = {"args": {"deep": Unstorable() if context.rank == 0 else 1}}
    for state, says in (({"own": own}, f"o/shard_{context.world - 1}_"), (common, "args.deep")):
        error = raised(lambda state=state: dist_checkpointing.save(state, path), says, "Unstorable")
        assert isinstance(error, CheckpointingException)
        assert dist_checkpointing.load_common_state_dict(path) == {"step": 1}


@case
def a_dtensor_that_is_no_part_is_an_error_of_all(context: Context) -> None:
    """What is common state has no key, and what has a box is this rank's alone."""
    rank, world, path = context.rank, context.world, context.folder / "c"
    whole = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (world,)), [Shard(0)])
    box = (torch.float32, tuple(whole.shape), (4 * world * world,), (4 * world * rank,), (world,))
    states = {"x.0.w": {"x": [{"w": whole} if rank == world - 1 else 1]}}
    if world > 1:
        states["'w'"] = {"w": ShardedTensor("w", whole, *box)}
    for says, state in states.items():
        error = raised(
            lambda state=state: dist_checkpointing.save(state, path), says, "DTensor", "to_local()"
        )
        assert isinstance(error, CheckpointingException)


@case
def damage_is_an_error_of_all(context: Context) -> None:
    """Of files that only one rank reads."""
    path = context.folder / "c"

    def state(filled: bool) -> dict[str, Any]:
        data = torch.full((500,), float(context.rank)) if filled else torch.zeros(500)
        own = ShardedTensor.from_rank_offsets("own", data, (0, context.rank, context.world))
        return {"own": own}

    dist_checkpointing.save(state(True), path)
    file = sorted(path.glob("shard-*.safetensors"))[-1]
    good = file.read_bytes()
    flipped = good[:-100] + bytes([good[-100] ^ 4]) + good[-99:]
    for damaged in (flipped, good[:-8], None):
        dist.barrier()
        if context.rank == 0:
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
        dist.barrier()
        for asked, options in ((state(False), {}), ({}, {"verify_integrity": True})):
            error = raised(
                lambda asked=asked, options=options: dist_checkpointing.load(
                    asked, path, **options
                ),
                "shard-",
            )
            assert isinstance(error, CheckpointingException)


@case
def arguments_of_one_rank_are_an_error_of_all(context: Context) -> None:
    """Before anything is waited for: also what has no path, or is of no kind."""
    last, path = context.rank == context.world - 1, context.folder / "c"
    save, load = dist_checkpointing.save, dist_checkpointing.load
    save({"step": 1}, path)
    own = ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=context.rank)
    calls = {
        "PathLike": lambda: save({"w": own}, None if last else path),
        "or os.PathLike": lambda: save({"w": own}, None if last else path, async_sharded_save=True),
        "://": lambda: save({"w": own}, "msc://profile/c" if last else path),
        "no strategy of a save": lambda: save({}, path, object() if last else None),
        "async_strategy": lambda: save({}, path, async_strategy="other" if last else "nvrx"),
        "strict is one of": lambda: load({}, path, strict="oops" if last else "raise_all"),
        "no strategy of a load": lambda: load({}, path, object() if last else None),
        "no such directory": lambda: dist_checkpointing.load_plain_tensors(
            context.folder / "nowhere" if last else path
        ),
    }
    for says, call in calls.items():
        raised(call, says)
        assert load({}, path) == {"step": 1}


@case
def entries_that_are_no_entries_are_an_error_of_all(context: Context) -> None:
    """In a value, as of a rank whose common state is not the one that is stored."""
    rank, path = context.rank, context.folder / "c"
    dist_checkpointing.save({"step": 1}, path)
    last = rank == context.world - 1
    own = ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=0 if last else 1)
    state = {"held": deque([own])} if last else {"step": 2}
    for call in (dist_checkpointing.save, dist_checkpointing.load):
        error = raised(lambda call=call: call(state, path), f"rank {context.world - 1}", "held.0")
        assert isinstance(error, CheckpointingException) and "in a deque" in str(error)


@case
def what_is_no_checkpoint_is_an_error_of_all(context: Context) -> None:
    path = context.folder / "c"
    wrong = {
        "no such directory": None,
        "no metadata.json": "",
        "is no JSON": "{",
        "is of the backend other": '{"sharded_backend": "other"}',
    }
    for says, config in wrong.items():
        dist.barrier()
        if context.rank == 0 and config is not None:
            path.mkdir(exist_ok=True)
            if config:
                (path / "metadata.json").write_text(config)
        dist.barrier()
        error = raised(lambda: dist_checkpointing.load({}, path), says, str(path))
        assert isinstance(error, CheckpointingException)


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What the loggers below `name` say."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def without_data(lacks: bool) -> ShardedTensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    made = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world))
    return made.without_data() if lacks else made


@case
def keys_that_do_not_fit(context: Context) -> None:
    rank, path = context.rank, context.folder / "c"
    last = rank == context.world - 1

    def entry(key: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.zeros(3), replica_id=rank)

    saved = {"a": entry("a"), "b": entry("b"), "x": 5}
    dist_checkpointing.save(saved, path)

    def request() -> dict[str, Any]:
        state = {"a": entry("a")}
        if last:
            key = f"more.{rank}"
            state["more"] = ShardedTensor.from_rank_offsets(key, torch.zeros(3))
        return state

    load = dist_checkpointing.load
    unexpected = {f"more.{rank}"} if last else set()
    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        error = raised(
            lambda strict=strict: load(request(), path, strict=strict),
            "Unexpected keys",
            f"more.{context.world - 1} (rank {context.world - 1})",
            str(path),
        )
        assert isinstance(error, CheckpointingException)
        assert ("Missing keys" in str(error)) == (strict == "raise_all")
    for strict in ("log_unexpected", "log_all", "ignore_all"):
        with logged("torch_ckpt.megatron") as told:
            loaded = load(request(), path, strict=strict)
        assert loaded.keys() == {"a", "x"}, loaded
        said = [each.partition(" keys")[0] for each in told]
        unexpected_here = ["Unexpected"] * (last and strict != "ignore_all")
        missing_here = ["Missing"] * (rank == 0 and strict == "log_all")
        assert said == unexpected_here + missing_here, everywhere(told)
    for strict, missing in (("return_unexpected", set()), ("return_all", {"b"})):
        loaded, lacking, left = load(request(), path, strict=strict)
        assert loaded.keys() == {"a", "x"}
        assert (lacking, left) == (missing, unexpected), everywhere((lacking, left))
