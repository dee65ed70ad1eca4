"""enable_plan_caching: what is not sent again must still be what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from planner_storage import Storage, same
from torch.distributed.checkpoint.planner import SavePlan

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter, LocalBoxes
from torch_ckpt.dcp.plan import plan_cache
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.errors import ConflictError, IncompleteError, InvalidArgumentError
from torch_ckpt.planning.per_rank import PerRank
from torch_ckpt.planning.reserved import PLAN_TOKEN

CACHED = {"enable_plan_caching": True}


def test_cached_plans_follow_what_changed():
    size, key = [4], [1]

    def states(rank):
        return lambda: {
            "t": torch.ones(size[0]),
            "d": {key[0]: rank if rank else 7},
            "own": PerRank(rank),
        }

    both = [states(0), states(1)]
    first = Storage().save(both, **CACHED)
    again = Storage().save(both, **CACHED)
    assert [len(plan.items) for plan in again.plans] == [len(plan.items) for plan in first.plans]
    assert same(
        again.load(dict, rebuild=True, world=2),
        {"t": torch.ones(4), "d": {1: 7}, "own": PerRank(0)},
    )
    size[0] = 6
    assert Storage().save(both, **CACHED).whole("t").shape == (6,)
    key[0] = "1"  # the items are equal, what the keys are is not
    changed = Storage().save(both, **CACHED)
    assert list(changed.load(dict, rebuild=True, world=2)["d"]) == ["1"]


def test_cached_plans_follow_a_change_of_dtype():
    Storage().save([lambda: {"t": torch.ones(2)}], **CACHED)
    storage = Storage().save([lambda: {"t": torch.ones(2, dtype=torch.float16)}], **CACHED)
    assert storage.metadata.state_dict_metadata["t"].properties.dtype is torch.float16


def test_cached_plans_follow_boxes() -> None:
    """Cut otherwise, exchanged between ranks, named in another order: of one rank and of both."""
    cuts = [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    add = [0.0]

    def state(rank: int) -> Any:
        def make() -> dict[str, Any]:
            whole = torch.arange(8.0) + add[0]
            held = [((begin,), whole[begin:end]) for begin, end in cuts[rank]]
            return {"w": LocalBoxes((8,), held), "t": torch.full((2,), add[0])}

        return make

    def saved(*usable: bool) -> None:
        add[0] += 1
        storage = Storage().save([state(0), state(1)], **CACHED)
        assert torch.equal(storage.whole("w"), torch.arange(8.0) + add[0])
        assert torch.equal(storage.whole("t"), torch.full((2,), add[0]))
        assert tuple(plan.usable for plan in storage.sent) == usable

    saved(True, True)
    saved(False, False)
    cuts[1] = [(2, 3), (3, 4), (6, 8)]
    saved(False, True)
    saved(False, False)
    cuts[0], cuts[1] = cuts[1], cuts[0]
    saved(True, True)
    cuts[0].reverse()
    saved(True, False)
    cuts[0] = cuts[0][:1]
    cuts[1] = [(0, 2), (2, 6)]
    saved(True, True)
    saved(False, False)


def save(state: dict[str, Any], path: Path, make: Any = SavePlanner, **options: Any) -> None:
    writer = HuggingFaceStorageWriter(path, save_distributed=True, **options)
    torch_ckpt.save(state, storage_writer=writer, planner=make(**CACHED))


def check(state: dict[str, Any], path: Path) -> None:
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    torch_ckpt.load(target, checkpoint_id=path)
    assert all(torch.equal(target[name], state[name]) for name in state)


OLD = {"w": torch.zeros(4)}
NEW = {"w": torch.ones(4), "new": torch.full((3,), 7.0)}


def test_a_save_that_failed_after_planning(tmp_path: Path) -> None:
    """Stock's cache keeps its global plan, by which no rank has a final one."""
    save(OLD, tmp_path / "a")
    for _ in range(2):
        with pytest.raises(ConflictError):
            save(NEW, tmp_path / "a", overwrite=False)
    for number in range(2):
        save(NEW, tmp_path / f"b{number}")
        check(NEW, tmp_path / f"b{number}")


def test_a_first_save_that_failed(tmp_path: Path) -> None:
    torch_ckpt.save(OLD, checkpoint_id=tmp_path / "a")
    for _ in range(2):
        with pytest.raises(ConflictError):
            save(NEW, tmp_path / "a", overwrite=False)
    save(NEW, tmp_path / "a")
    check(NEW, tmp_path / "a")


def test_planned_by_stock_and_not_written(tmp_path: Path) -> None:
    """Stock's planner loses the tensor in the same way; the commit says so."""
    save(OLD, tmp_path / "a", dcp.DefaultSavePlanner)
    with pytest.raises(ConflictError):
        save(NEW, tmp_path / "a", dcp.DefaultSavePlanner, overwrite=False)
    with pytest.raises(IncompleteError, match="'new': was planned, and no rank has written it"):
        save(NEW, tmp_path / "a", dcp.DefaultSavePlanner)
    check(OLD, tmp_path / "a")


def test_plans_that_were_refused_are_forgotten() -> None:
    good = [lambda: {"x": torch.ones(2)}, lambda: {"x": torch.ones(2), "own": torch.ones(1)}]
    bad = [good[0], lambda: {"x": torch.ones(3), "other": torch.ones(1)}]
    first = Storage().save(good, **CACHED)
    with pytest.raises(InvalidArgumentError, match="disagree"):
        Storage().save(bad, **CACHED)
    for _ in range(2):
        again = Storage().save(good, **CACHED)
        assert again.data.keys() == first.data.keys()
    assert not any(plan.usable for plan in again.sent)


def test_only_what_changed_is_sent() -> None:
    size = [1]
    states = [
        lambda: {"a": torch.ones(3)},
        lambda: {"b": torch.ones(size[0])},
    ]
    assert all(plan.usable for plan in Storage().save(states, **CACHED).sent)
    assert not any(plan.usable for plan in Storage().save(states, **CACHED).sent)
    size[0] = 2
    storage = Storage().save(states, **CACHED)
    assert [plan.usable for plan in storage.sent] == [False, True]
    assert storage.whole("b").shape == (2,)
    assert not any(plan.usable for plan in Storage().save(states, **CACHED).sent)


def test_other_ranks_than_before() -> None:
    """A rank that goes by a plan of other ranks is told so once, and then sends its own."""
    three = [lambda: {"a": torch.ones(3), "b": torch.ones(3)}] * 3
    Storage().save(three, **CACHED)
    with pytest.raises(ConflictError, match="rank 0: its plan was cached by a save of other ranks"):
        Storage().save(three[:2], world=3, **CACHED)
    storage = Storage().save(three[:2], world=3, **CACHED)
    assert {index.fqn for index in storage.data} == {"a", "b"}


def test_a_rank_by_itself_beside_saves_of_all() -> None:
    both = [lambda: {"a": torch.ones(3), "b": torch.ones(3)}] * 2
    for _ in range(2):
        Storage().save(both, **CACHED)
        storage = Storage().save(both[:1], world=2, **CACHED)
        assert {index.fqn for index in storage.data} == {"a", "b"}
    assert not any(plan.usable for plan in Storage().save(both, **CACHED).sent)


def test_saves_at_the_same_time() -> None:
    """The end of one goes by what itself began with."""
    key = ("key",)
    plans = [SavePlan([], planner_data={PLAN_TOKEN: token}) for token in ("1", "2")]
    plan_cache.begin(key)
    first = plan_cache.finish(key, SavePlan([]), plans[0], None)
    last = plan_cache.begin(key)  # of A
    assert last is not None and plan_cache.begin(key) is None  # B cannot know what A will do
    plan_cache.finish(key, SavePlan([]), plans[1], None)
    assert plan_cache.finish(key, SavePlan([]), plan_cache.unchanged("1"), last) is first


def test_the_same_names_nested_in_another_way(tmp_path: Path) -> None:
    for number, state in enumerate([{"a.b": torch.ones(2)}, {"a": {"b": torch.ones(2)}}]):
        save(state, tmp_path / str(number))
        target: dict[str, Any] = {}
        planner = torch_ckpt.LoadPlanner(rebuild=True)
        torch_ckpt.load(target, checkpoint_id=tmp_path / str(number), planner=planner)
        assert same(target, state)


@pytest.mark.parametrize("make", [dcp.DefaultSavePlanner, SavePlanner])
def test_a_cached_plan_and_a_mapping_that_lacks_a_tensor(tmp_path: Path, make: Any) -> None:
    save(NEW, tmp_path / "a", make)
    with pytest.raises(InvalidArgumentError, match="'new': is not in fqn_to_index_mapping"):
        save(NEW, tmp_path / "b", make, fqn_to_index_mapping={"w": 1})
    mapping = {"w": 1, "new": 1, "more": 2}
    with pytest.raises(InvalidArgumentError, match="'more': is in fqn_to_index_mapping but not"):
        save(NEW, tmp_path / "b", make, fqn_to_index_mapping=mapping, enable_consolidation=True)
    assert not list(tmp_path.glob("b/**/*"))  # a parent that was made may stay


@pytest.mark.parametrize("make", [dcp.DefaultSavePlanner, SavePlanner])
def test_cached_plans_with_all_kinds_of_leaves(tmp_path: Path, make: Any) -> None:
    """The leaf in which our planner keeps the containers among them."""
    for number in range(3):
        state = {"w": torch.full((2,), float(number)), "d": {3: number, "e": {}}, "l": [number]}
        save(state, tmp_path / "c", make, fqn_to_index_mapping={"w": 1})
        target: dict[str, Any] = {}
        planner = torch_ckpt.LoadPlanner(rebuild=True)
        torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=planner)
        if make is SavePlanner:
            assert same(target["d"], state["d"])
        assert torch.equal(target["w"], state["w"]) and target["l"] == [number]
