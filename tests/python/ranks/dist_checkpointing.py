"""torch_ckpt.megatron.dist_checkpointing on several ranks."""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks.layouts import DEVICE
from ranks.run import Context, cases, everywhere, raised

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

CASES, case = cases()

LAYERS, HIDDEN = 3, 24  # of which 1, 2, 3 and 4 ranks have a part alike


def whole(name: str, *shape: int) -> torch.Tensor:
    """A tensor that its name and shape say."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(shape, generator=generator)


def part(tensor: torch.Tensor, axis: int, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world, axis)[rank].clone()


def swiglu(key: str, data: torch.Tensor, rank: int, world: int) -> ShardedTensorFactory:
    """The two halves of `data` are boxes of one tensor, as in Megatron's MLP."""

    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key, half, (0, rank + at * world, 2 * world), replica_id=replica
            )
            for at, half in enumerate(data.chunk(2))
        ]

    return ShardedTensorFactory(key, data, build, torch.cat)


def gpt(rank: int, world: int, filled: bool = True) -> dict[str, Any]:
    """The state of a model that is cut as Megatron's are by tensor parallelism."""

    def of(value: torch.Tensor) -> torch.Tensor:
        return (value if filled else torch.full_like(value, -1.0)).to(DEVICE)

    state: dict[str, Any] = {"layers": []}
    for layer in range(LAYERS):
        qkv = part(whole(f"qkv{layer}", HIDDEN, 5), 0, rank, world)
        gate, up = (
            part(whole(f"{name}{layer}", HIDDEN, 3), 0, rank, world) for name in ("gate", "up")
        )
        state["layers"].append(
            {
                "qkv": ShardedTensor.from_rank_offsets(
                    "layers.qkv", of(qkv), (0, layer, LAYERS), (1, rank, world), prepend_axis_num=1
                ),
                "fc1": swiglu(f"layers.{layer}.fc1", of(torch.cat([gate, up])), rank, world),
                "norm": ShardedTensor.from_rank_offsets(
                    f"layers.{layer}.norm", of(whole(f"norm{layer}", 7)), replica_id=rank
                ),
                "_extra_state": ShardedObject(
                    f"layers.{layer}._extra_state", b"scale" if filled else None, (1,), (0,), rank
                ),
            }
        )
    state["rng"] = ShardedObject(
        "rng_state", [rank, (1, "x")] if filled else None, (world,), (rank,)
    )
    state["local"] = LocalNonpersistentObject({"rank": rank})
    state["iteration"] = 100 if filled else -5
    state["args"] = argparse.Namespace(lr=0.1, dtype=torch.bfloat16)
    state["optimizer"] = {"param_groups": [{"lr": 0.5, "params": LocalNonpersistentObject([rank])}]}
    return state


def check(loaded: dict[str, Any], rank: int, world: int, saved_by: int) -> None:
    for layer, found in enumerate(loaded["layers"]):
        assert torch.equal(
            found["qkv"].cpu(), part(whole(f"qkv{layer}", HIDDEN, 5), 0, rank, world)
        )
        halves = [
            part(whole(f"{name}{layer}", HIDDEN, 3), 0, rank, world) for name in ("gate", "up")
        ]
        assert torch.equal(found["fc1"].cpu(), torch.cat(halves))
        assert torch.equal(found["norm"].cpu(), whole(f"norm{layer}", 7))
        assert found["_extra_state"] == b"scale"
    assert len(loaded["layers"]) == LAYERS
    assert loaded["local"] == {"rank": rank}
    assert loaded["iteration"] == 100
    assert loaded["args"] == argparse.Namespace(lr=0.1, dtype=torch.bfloat16)
    assert loaded["optimizer"] == {"param_groups": [{"lr": 0.5, "params": [rank]}]}
    if world == saved_by:
        assert loaded["rng"] == [rank, (1, "x")]


@case
def save(context: Context) -> None:
    path = context.shared / f"megatron-{context.world}"
    state = gpt(context.rank, context.world)
    before = [*state["layers"][0].values()]
    dist_checkpointing.save(state, path, content_metadata={"kind": "test"})
    assert all(a is b for a, b in zip(before, state["layers"][0].values(), strict=True))
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert dist_checkpointing.load_content_metadata(path) == {"kind": "test"}
    assert json.loads((path / "metadata.json").read_text()) == {
        "sharded_backend": "torch_ckpt",
        "sharded_backend_version": 1,
    }
    torch_ckpt.open(path).verify()
    data = [each.name for each in path.glob("shard-*.safetensors")]
    assert len(data) == context.world, data  # one file a rank


@case
def load_in_other_worlds(context: Context) -> None:
    rank, world = context.rank, context.world
    found = sorted(context.shared.glob("megatron-[0-9]"))
    assert found
    for path in found:
        saved_by = int(path.name.rpartition("-")[2])
        request = gpt(rank, world, filled=False)
        if world != saved_by:
            del request["rng"]  # objects are not resharded
        memory = request["layers"][1]["fc1"].data
        address = memory.data_ptr()
        loaded = dist_checkpointing.load(request, path)
        check(loaded, rank, world, saved_by)
        assert loaded["layers"][1]["fc1"].data_ptr() == address  # merged without a copy
        assert loaded["content_metadata"] == {"kind": "test"}


@case
def whole_tensors_are_what_was_saved(context: Context) -> None:
    path = context.folder / "c"
    dist_checkpointing.save(gpt(context.rank, context.world), path)
    loaded = dist_checkpointing.load_plain_tensors(path)
    stacked = torch.stack([whole(f"qkv{layer}", HIDDEN, 5) for layer in range(LAYERS)])
    assert torch.equal(loaded["layers.qkv"], stacked)
    assert torch.equal(torch_ckpt.open(path)["layers.qkv"][...], stacked)
    found = dist_checkpointing.load_sharded_metadata(path)
    names = {f"rng_state/shard_{rank}_{context.world}" for rank in range(context.world)}
    assert names < found.keys()
    assert not any(name.startswith(("common_state", "content_metadata")) for name in found)


@case
def ranks_share_what_they_all_have(context: Context) -> None:
    path, world = context.folder / "c", context.world
    names = [f"w{number}" for number in range(8 * world)]

    def state(filled: bool) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(
                name,
                whole(name, 64) if filled else torch.zeros(64),
                replica_id=(0, 0, context.rank),
            )
            for name in names
        }

    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_checkpointing.save(state(True), path, strategy)
    sizes = [each.stat().st_size for each in sorted(path.glob("shard-*.safetensors"))]
    assert len(sizes) == world, sizes
    reading = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    loaded = dist_checkpointing.load(state(False), path, reading)
    assert all(torch.equal(loaded[name], whole(name, 64)) for name in names)


@case
def ranks_share_within_groups(context: Context) -> None:
    if context.world < 4:
        return
    path = context.folder / "c"
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = context.rank // 2
    # Main replicas are on ranks 0 and 1 (of one tensor) and 2 and 3 (of the other); each rank has
    # both, and is not to write the other group's.
    state = {
        name: ShardedTensor.from_rank_offsets(
            name,
            whole(name, 512),
            replica_id=(context.rank % 2, 0 if number == own else 1),
        )
        for number, name in enumerate(("a", "b"))
    }
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups[own])
    dist_checkpointing.save(state, path, strategy)
    loaded = dist_checkpointing.load_plain_tensors(path)
    assert all(torch.equal(loaded[name], whole(name, 512)) for name in ("a", "b"))
    files = torch_ckpt.open(path).describe().files
    assert len([each for each in files if each.name.endswith(".safetensors")]) == 2


@case
def ranks_share_only_what_has_a_main_replica(context: Context) -> None:
    """Rank 0 has all; the others have it as two replicas."""
    value = torch.arange(4.0)
    boxes = [(0, 4)] if context.rank == 0 else [(0, 2), (2, 2)]
    state = {
        "k": [
            ShardedTensor(
                *("k", value[at : at + size].clone(), torch.float32, (size,), (4,), (at,), None),
                replica_id=context.rank,
            )
            for at, size in boxes
        ]
    }
    shared = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_checkpointing.save(state, context.folder / "k", shared)
    assert torch.equal(dist_checkpointing.load_plain_tensors(context.folder / "k")["k"], value)


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
        "disagree": cut(dtype=torch.float16 if last else torch.float32),
        "ranks 0 and": cut(shape=(5, 2) if last else (4, 2)),
    }
    if world == 1:
        wrong = {"hole": wrong["hole"]}
    for says, state in wrong.items():
        error = raised(lambda state=state: dist_checkpointing.save(state, path), says, "'w'")
        assert isinstance(error, CheckpointingException)
        assert dist_checkpointing.load_common_state_dict(path) == {"step": 1}
    error = raised(lambda: dist_checkpointing.save({"w": _without_data(last)}, path), "no data")
    assert isinstance(error, CheckpointingException)
    # Without the count of replicas equal boxes are one, and a hole is a hole.
    dist_checkpointing.save(cut(offset=(0, 1), replica=0), path, validate_access_integrity=False)
    holed = cut(replica=1 if last else 0)
    raised(lambda: dist_checkpointing.save(holed, path, validate_access_integrity=False), "w")


def _without_data(lacks: bool) -> ShardedTensor:
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
            lambda strict=strict: load(request(), path, strict=strict), "Unexpected keys", "more."
        )
        assert isinstance(error, CheckpointingException)
        assert ("Missing keys" in str(error)) == (strict == "raise_all")
    for strict in ("log_unexpected", "log_all", "ignore_all"):
        loaded = load(request(), path, strict=strict)
        assert loaded.keys() == {"a", "x"}, loaded
    for strict, missing in (("return_unexpected", set()), ("return_all", {"b"})):
        loaded, lacking, left = load(request(), path, strict=strict)
        assert loaded.keys() == {"a", "x"}
        assert (lacking, left) == (missing, unexpected), everywhere((lacking, left))


@case
def common_state_that_differs_is_told_once(context: Context) -> None:
    path = context.folder / "c"
    state = {"step": 7, "own": {"rank": context.rank}}
    dist_checkpointing.save(state, path)
    assert dist_checkpointing.load_common_state_dict(path) == {"step": 7, "own": {"rank": 0}}
    dist_checkpointing.save(
        state,
        path,
        preprocess_common_before_consistancy_check=lambda common: {"step": common["step"]},
    )
    assert dist_checkpointing.load({}, path) == {"step": 7, "own": {"rank": 0}}


@case
def boxes_of_any_sizes(context: Context) -> None:
    """Several boxes of one key on a rank, as the distributed optimizer has them."""
    path, rank, world = context.folder / "c", context.rank, context.world
    value = whole("flat", 10 * world)

    def state(filled: bool) -> dict[str, Any]:
        cuts = [0, 3, 7, 10]
        return {
            str(at): ShardedTensor(
                "flat, (with) a comma/and a slash",
                value[10 * rank + at : 10 * rank + end].clone()
                if filled
                else torch.zeros(end - at),
                torch.float32,
                (end - at,),
                (10 * world,),
                (10 * rank + at,),
                None,
            )
            for at, end in zip(cuts, cuts[1:], strict=False)
        }

    dist_checkpointing.save(state(True), path)
    loaded = dist_checkpointing.load(state(False), path)
    found = torch.cat([loaded["0"], loaded["3"], loaded["7"]])
    assert torch.equal(found, value[10 * rank : 10 * rank + 10])
    (plain,) = [
        each for each in dist_checkpointing.load_plain_tensors(path).values() if each.numel() > 1
    ]
    assert torch.equal(plain, value)


def polled(queue: AsyncCallsQueue, calls: int) -> list[tuple[int, int]]:
    """Train, and poll as Megatron does, until `calls` are finalized: (number, poll) of each."""
    done: list[tuple[int, int]] = []
    step = torch.zeros(1)
    for poll in range(20_000):
        done += [(number, poll) for number in queue.maybe_finalize_async_calls()]
        if len(done) == calls:
            return done
        dist.all_reduce(step)
        time.sleep(0.001)
    raise AssertionError(f"finalized {done}")


@case
def async_saves_are_finalized_at_one_poll(context: Context) -> None:
    rank, world = context.rank, context.world
    queue = AsyncCallsQueue()
    order: list[Any] = []
    for number in range(3):
        state = gpt(rank, world)
        path = context.folder / f"c{number}"
        request = dist_checkpointing.save(state, path, async_sharded_save=True)
        assert request is not None
        request.add_finalize_fn(dist.barrier)
        request.add_finalize_fn(
            lambda number=number, path=path: order.append(
                (number, dist_checkpointing.check_is_distributed_checkpoint(path))
            )
        )
        assert queue.schedule_async_request(request) == number
        for layer in state["layers"]:  # training goes on
            for entry in layer.values():
                if isinstance(entry.data, torch.Tensor):
                    entry.data.fill_(-7.0)
        state["optimizer"]["param_groups"][0]["lr"] = -7.0
    assert queue.get_num_unfinalized_calls() > 0
    done = polled(queue, 3)
    assert [number for number, _ in done] == [0, 1, 2]
    assert len({tuple(each) for each in everywhere(done)}) == 1, everywhere(done)
    assert order == [(0, True), (1, True), (2, True)]
    assert queue.get_num_unfinalized_calls() == 0
    for number in range(3):
        loaded = dist_checkpointing.load(
            gpt(rank, world, filled=False), context.folder / f"c{number}"
        )
        check(loaded, rank, world, world)


@case
def ranks_may_be_polls_apart(context: Context) -> None:
    """Nothing but the polls is between them, and a rank may have made many before another."""
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save({"step": 1}, context.folder / "a", async_sharded_save=True)
    request.add_finalize_fn(dist.barrier)
    queue.schedule_async_request(request)
    done = []
    for poll in range(5000):
        done += [(number, poll) for number in queue.maybe_finalize_async_calls()]
        if done:
            break
        time.sleep(0.002 * (1 + 3 * ((context.rank + poll // 50) % context.world)))
    assert len({tuple(each) for each in everywhere(done)}) == 1 and done, everywhere(done)


@case
def an_async_save_that_fails_is_an_error_at_the_poll(context: Context) -> None:
    queue = AsyncCallsQueue()
    called: list[int] = []
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=context.rank)}
    (context.folder / "file").touch()
    nowhere = context.folder / "file" / "c"
    request = dist_checkpointing.save(state, nowhere, async_sharded_save=True)
    assert request is not None
    request.add_finalize_fn(lambda: called.append(1))
    queue.schedule_async_request(request)
    raised(lambda: polled(queue, 1), "file")
    assert not called and queue.get_num_unfinalized_calls() == 0
    request = dist_checkpointing.save(state, context.folder / "c", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.close()
    assert torch.equal(
        dist_checkpointing.load_plain_tensors(context.folder / "c")["w"], torch.ones(2)
    )


@case
def requests_of_the_application(context: Context) -> None:
    queue = AsyncCallsQueue(persistent=True)
    rank = context.rank
    go = threading.Event()
    ran: list[Any] = []

    def work(first: str, staged: int, last: str, *, more: int) -> None:
        assert go.wait(60)
        ran.append(
            (first, staged, last, more, threading.current_thread() is threading.main_thread())
        )

    queue.schedule_async_request(
        AsyncRequest(
            work,
            ("a", None, "b"),
            [dist.barrier],
            async_fn_kwargs={"more": 1},
            preload_fn=lambda: 5,
        )
    )
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: ran.append("end")]))
    for _ in range(3):
        assert queue.maybe_finalize_async_calls() == []
        dist.barrier()
    if rank == 0:
        go.set()
        time.sleep(0.05)
    for _ in range(3):  # the others are still at work
        assert context.world == 1 or queue.maybe_finalize_async_calls() == []
        dist.barrier()
    go.set()
    done = polled(queue, 2)
    assert [number for number, _ in done] == [0, 1]
    assert len({tuple(each) for each in everywhere(done)}) == 1
    assert ran == [("a", 5, "b", 1, False), "end"]

    def fails() -> None:
        if rank == context.world - 1:
            raise ValueError("of the application")

    frozen = AsyncRequest(fails, (), []).freeze()
    try:
        frozen.add_finalize_fn(print)
        raise AssertionError("a frozen request has taken a function")
    except RuntimeError:
        pass
    queue.schedule_async_request(frozen)
    if rank == context.world - 1:
        try:
            polled(queue, 1)
            raise AssertionError("no error")
        except ValueError:
            pass
    else:
        polled(queue, 1)


@case
def a_queue_that_is_aborted(context: Context) -> None:
    queue = AsyncCallsQueue()
    path, called = context.folder / "c", []
    for value in (1.0, 2.0):
        state = {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.full((2,), value), replica_id=context.rank
            )
        }
        request = dist_checkpointing.save(state, path, async_sharded_save=True)
        assert request is not None
        request.add_finalize_fn(lambda: called.append(1))
        queue.schedule_async_request(request)
    queue.close(abort=True)
    assert not called and queue.get_num_unfinalized_calls() == 0
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 3.0), replica_id=context.rank)
    }
    dist_checkpointing.save(state, path)
    assert dist_checkpointing.load_plain_tensors(path)["w"].tolist() == [3.0, 3.0]


@case
def errors_while_it_is_prepared_are_of_all(context: Context) -> None:
    last = context.rank == context.world - 1
    raised(
        lambda: dist_checkpointing.save(
            {"w": _without_data(last)}, context.folder / "c", async_sharded_save=True
        ),
        "no data",
    )
