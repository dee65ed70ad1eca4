"""Tensors that are made of others, sharded, and boxes that ranks name: every launch loads what the
earlier ones saved, in other worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocked import Blocked, Filled, Halting, Mixed, Rows, blocked, same, zeros_like
from ranks.run import Context, cases, raised
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_ckpt
from torch_ckpt import LocalBoxes
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native.torch_private import dtensor_of

CASES, case = cases()

WORLDS = (4, 2, 3, 1)
# Rows of the whole: in some worlds a rank has fewer of them, or none.
ROWS = {"even": 24, "uneven": 7, "few": 2}
KINDS = {"even": Filled, "uneven": Rows, "few": Rows}
SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "sharded": torch_ckpt.save,
    "final": lambda state, path: torch_ckpt.save(state, path, layout="final"),
    "parts": lambda state, path: torch_ckpt.save(state, path, use_collectives=False),
    "async": lambda state, path: torch_ckpt.async_save(state, path).result(),
}
SHAPE = (9, 10)


def save_in_a_process(state: Any, path: Path) -> None:
    kind = AsyncCheckpointerType.PROCESS
    torch_ckpt.async_save(state, path, async_checkpointer_type=kind).result()


SAVES_OF_TWO = {**SAVES, "process": save_in_a_process}


def sharded(whole: Blocked, placement: Any = None) -> DTensor:
    """This rank's rows of it, as FSDP has them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = DTensor.from_local(
        torch.empty(0), mesh, [placement or Shard(0)], shape=whole.shape, stride=whole.stride()
    )
    local = whole
    if placement is None:
        rows, size, rank = whole.shape[0], dist.get_world_size(), dist.get_rank()
        per_rank = -(-rows // size)
        begin = min(rank * per_rank, rows)
        local = type(whole).part(whole, 0, begin, min(begin + per_rank, rows))
    return dtensor_of(local, like)


def part(value: DTensor) -> Any:
    return value._local_tensor


def states(blank: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, (name, rows) in enumerate(ROWS.items()):
        whole = blocked(rows, number, kind=KINDS.get(name, Blocked))
        whole = zeros_like(whole) if blank else whole
        state[name] = {"exp_avg": sharded(whole), "step": torch.tensor(0.0 if blank else 3.0)}
    whole = blocked(4, 9)
    state["replicated"] = sharded(zeros_like(whole) if blank else whole, Replicate())
    return state


def check(state: dict[str, Any]) -> None:
    for number, (name, rows) in enumerate(ROWS.items()):
        wanted = part(sharded(blocked(rows, number, kind=KINDS.get(name, Blocked))))
        got = part(state[name]["exp_avg"])
        assert torch.equal(got.codes, wanted.codes) and torch.equal(got.scale, wanted.scale), name
        if wanted.numel():  # a rank that has no rows is given nothing
            assert same(got, wanted), name
    assert same(part(state["replicated"]), blocked(4, 9))


def boxes(blank: bool = False) -> LocalBoxes:
    """What this rank has of a matrix: every so manieth row, in two boxes."""
    whole = torch.arange(90.0).view(SHAPE)
    held = []
    for row in range(dist.get_rank(), SHAPE[0], dist.get_world_size()):
        cut = 1 + row % 7
        for begin, end in ((0, cut), (cut, SHAPE[1])):
            box = whole[row : row + 1, begin:end].clone()
            held.append(((row, begin), torch.zeros_like(box) if blank else box))
    return LocalBoxes(SHAPE, held, torch.float32)


def directory(shared: Path, world: int, name: str) -> Path:
    return shared / f"wrapped-{name}-of-{world}"


@case
def save(context: Context) -> None:
    for name, save_as in (SAVES_OF_TWO if context.world == 2 else SAVES).items():
        state = {**states(), "boxes": boxes(), "nothing": LocalBoxes((0, 3), [], torch.int8)}
        if context.rank == 0:  # of what has no elements one rank has all
            state["nothing"] = LocalBoxes((0, 3), [((0, 0), torch.empty(0, 3).to(torch.int8))])
        path = directory(context.shared, context.world, name)
        save_as(state, path)
        # Of this rank, whose boxes make no box in most worlds.
        assert len(list(path.glob(f"shard-{context.rank + 1:05}-*"))) == (name != "final")


@case
def cached_plans_of_boxes(context: Context) -> None:
    """Saved twice alike, then with rows that other ranks had, then cut elsewhere."""
    whole = torch.arange(90.0).view(SHAPE)
    for number in range(5):
        turn, cut = int(number > 1), 2 if number < 4 else 7
        rows = range((context.rank + turn) % context.world, SHAPE[0], context.world)
        held = [
            ((row, begin), whole[row : row + 1, begin:end] + number)
            for row in rows
            for begin, end in ((0, cut), (cut, SHAPE[1]))
        ]
        planner = torch_ckpt.SavePlanner(enable_plan_caching=True)
        state = {"boxes": LocalBoxes(SHAPE, held, torch.float32)}
        torch_ckpt.save(state, context.folder / "c", planner=planner)
        loaded = torch_ckpt.load(None, context.folder / "c")
        assert torch.equal(loaded["boxes"], whole + number), number


@case
def load_in_other_worlds(context: Context) -> None:
    found = [
        path
        for world in WORLDS
        for name in SAVES_OF_TWO
        if (path := directory(context.shared, world, name)).exists()
    ]
    assert len(found) >= len(SAVES)
    for path in found:
        target = {**states(blank=True), "boxes": boxes(blank=True)}
        torch_ckpt.load(target, path)
        check(target)
        for (at, got), (_, wanted) in zip(target["boxes"].boxes, boxes().boxes, strict=True):
            assert torch.equal(got, wanted), at
        assert torch.equal(torch_ckpt.load(None, path)["boxes"], torch.arange(90.0).view(SHAPE))


@case
def what_a_class_does_not_say(context: Context) -> None:
    if context.world == 1:
        return
    whole = blocked(12, 1, kind=Halting)
    local = Blocked.part(whole, 0, 0, 12 // context.world)
    value = sharded(blocked(12, 1))
    value._local_tensor = Halting(local.codes, local.scale, local.table)
    said = ("w", "blocked.Halting", "no slices")
    error = raised(lambda: torch_ckpt.save({"w": value}, context.folder / "c"), *said)
    assert isinstance(error, UnsupportedError)
    value._local_tensor = Mixed(local.codes, local.scale, local.table)
    error = raised(
        lambda: torch_ckpt.save({"w": value}, context.folder / "c"), "no dimension of its scale"
    )
    assert isinstance(error, UnsupportedError)
    # Five rows, of which two have three scales: the whole would have seven and a half.
    odd = sharded(blocked(5, 1, columns=64))
    rows = part(odd).shape[0]
    odd._local_tensor = Blocked(
        part(odd).codes[:, :40], torch.rand({3: 4, 2: 3}.get(rows, rows)), part(odd).table
    )
    error = raised(lambda: torch_ckpt.save({"w": odd}, context.folder / "c"), "w", "scale")
    assert isinstance(error, UnsupportedError)
    raised(lambda: torch_ckpt.save({"w": sharded(whole, Partial())}, context.folder / "c"), "w")
    assert not (context.folder / "c").exists()


@case
def ranks_that_say_different_things(context: Context) -> None:
    if context.world == 1:
        return
    whole = blocked(12, 1)
    whole.signed = context.rank == 0
    error = raised(
        lambda: torch_ckpt.save({"w": sharded(whole)}, context.folder / "c"), "w", "disagree"
    )
    assert isinstance(error, InvalidArgumentError)
    # A tensor that no rank has a part of, of which one rank's would be stored.
    value = sharded(blocked(12, 1))
    value._local_tensor = Blocked(part(value).codes, part(value).scale, part(value).table.clone())
    part(value).table[0] -= float(context.rank)
    raised(lambda: torch_ckpt.save({"w": value}, context.folder / "c"), "w", "disagree", "shared")
    overlapping = LocalBoxes((4,), [((context.rank % 2,), torch.ones(2))])
    raised(lambda: torch_ckpt.save({"w": overlapping}, context.folder / "c"), "w")
    assert not (context.folder / "c").exists()
