"""Python's garbage collector while a save plans: off where nobody waits for it, on again after."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_ckpt
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.errors import CheckpointError, InvalidArgumentError
from torch_ckpt.native import operators
from torch_ckpt.native.sessions import SaveSession
from torch_ckpt.planning.collector import (
    paused_gc,
    seldom_full_collections,
    usual_full_collections,
)


@pytest.fixture(autouse=True)
def as_usual() -> None:
    """Nothing is left of a failed save of another test."""
    usual_full_collections()


def is_on() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] > 0


def test_garbage_collector_is_paused_and_restored():
    before = gc.get_threshold()
    with paused_gc():
        assert not is_on()
        with paused_gc():
            assert not is_on()
        assert not is_on()
    assert gc.get_threshold() == before
    with pytest.raises(InvalidArgumentError):
        SavePlanner().set_up_planner({"a.b": 1, "a": {"b": 2}}, None, True)
    assert gc.get_threshold() == before


def test_what_the_trainer_says_of_its_collector_meanwhile_holds() -> None:
    before = gc.get_threshold()
    try:
        with paused_gc():
            gc.disable()  # as torchtitan does, on another thread
        assert not gc.isenabled()
        with paused_gc():
            gc.enable()
        assert gc.isenabled() and gc.get_threshold() == before
        with paused_gc():
            gc.set_threshold(123, 5, 6)
        assert gc.get_threshold()[0] == 123
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_beside_the_main_thread_it_goes_on() -> None:
    seen = []

    def plan() -> None:
        with paused_gc():
            seen.append(is_on())

    thread = threading.Thread(target=plan)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_collects() -> None:
    """As the workers of a DataLoader are, from another thread."""
    with paused_gc():
        child = os.fork()
        if child == 0:
            os._exit(0 if is_on() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not is_on()
    assert is_on()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.own = self


def test_what_was_made_inside_counts_as_old_but_garbage_from_before_goes():
    garbage = weakref.ref(Node())
    assert garbage() is not None
    with paused_gc():
        assert garbage() is None
        kept = Node()
    young = [id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)]
    assert id(kept) not in young
    with contextlib.suppress(KeyError), paused_gc():
        kept = Node()
        raise KeyError
    assert any(thing is kept for thing in gc.get_objects(0)), "after an error nothing is moved"


def test_what_the_trainer_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_gc():
            pass
        assert gc.get_freeze_count() >= frozen
    finally:
        gc.unfreeze()


def test_a_save_ages_its_plan_and_not_what_it_leaves_behind(tmp_path):
    made = []

    class Littering(SavePlanner):
        def resolve_data(self, item):
            made.append(weakref.ref(Node()))
            return super().resolve_data(item)

    # Seen while the collector is off, as it would be old anyhow after a collection.
    class Watching(Littering):
        def finish_plan(self, new_plan):
            young.update(map(id, gc.get_objects(0)))
            planned.append(new_plan.items[0])
            return super().finish_plan(new_plan)

    young, planned = set(), []
    options = {"planner": Watching(), "no_dist": True}
    torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", **options)
    assert id(planned[0]) not in young, "the plan is walked by the next collection"
    gc.collect(1)
    assert made[0]() is None, "garbage of the write was aged"


def test_garbage_collector_is_off_while_the_main_thread_plans_a_save(tmp_path):
    seen = []

    class Watching(DefaultSavePlanner):
        def create_local_plan(self):
            seen.append(is_on())
            return super().create_local_plan()

        def resolve_data(self, item):
            seen.append(is_on())
            return super().resolve_data(item)

    options = {"planner": Watching(), "no_dist": True}
    torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", **options)
    assert seen == [False, False] and is_on()
    seen.clear()
    thread = threading.Thread(
        target=torch_ckpt.save,
        args=({"w": torch.ones(2)},),
        kwargs={"checkpoint_id": tmp_path / "c", **options},
    )
    thread.start()
    thread.join()
    assert seen == [True, True], "the trainer's garbage is collected while another thread saves"
    with pytest.raises(CheckpointError):
        torch_ckpt.save({"w": torch.eye(2).to_sparse()}, checkpoint_id=tmp_path / "b", **options)
    assert is_on()


def test_while_files_are_written_it_goes_on(tmp_path, monkeypatch):
    """Other threads go on meanwhile, and their garbage must not wait for the disk."""
    seen = []
    before = gc.get_threshold()
    for owner, name in ((operators, "write"), (SaveSession, "commit")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), seen))
    for layout in ("sharded", "final"):
        torch_ckpt.save({"w": torch.ones(2)}, tmp_path / layout, layout=layout)
    assert seen == [True] * 4 and gc.get_threshold() == before


def watched(call, seen):
    def calling(*arguments):
        seen.append(is_on())
        return call(*arguments)

    return calling


def test_stocks_planner_is_not_held_up_by_full_collections(tmp_path):
    state = {f"layer.{i}": torch.ones(1) for i in range(20)}
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)

    class Planner(DefaultSavePlanner):
        def create_local_plan(self):
            seen.append(gc.get_threshold())
            return super().create_local_plan()

    class Reading(DefaultLoadPlanner):
        def create_local_plan(self):
            seen.append(gc.get_threshold())
            return super().create_local_plan()

    seen: list[tuple[int, ...]] = []
    try:
        writer = torch_ckpt.HuggingFaceStorageWriter(str(tmp_path / "a"))
        dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        assert gc.get_threshold() == (50, 2, 2)
        reader = torch_ckpt.HuggingFaceStorageReader(str(tmp_path / "a"))
        dcp.load(state, storage_reader=reader, planner=Reading(), no_dist=True)
        assert gc.get_threshold() == (50, 2, 2)
    finally:
        gc.set_threshold(*before)
    assert [thresholds[:2] for thresholds in seen] == [(50, 2)] * 2
    assert all(thresholds[2] >= 1000 for thresholds in seen)


def test_after_an_error_of_the_planner_full_collections_come_as_before(tmp_path):
    class Failing(DefaultSavePlanner):
        def create_local_plan(self):
            assert gc.get_threshold()[2] > before[2]
            raise RuntimeError("no plan")

    before = gc.get_threshold()
    writer = torch_ckpt.HuggingFaceStorageWriter(str(tmp_path / "a"))
    with pytest.raises(CheckpointException):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=Failing(), no_dist=True)
    del writer
    gc.collect()
    assert gc.get_threshold() == before


class Owner:
    """Something that a planner plans for."""


def test_thresholds_that_somebody_sets_meanwhile_stay():
    before = gc.get_threshold()
    owner = Owner()
    try:
        seldom_full_collections(owner)
        gc.set_threshold(123, 5, 6)
        usual_full_collections()
        assert gc.get_threshold() == (123, 5, 6)
        seldom_full_collections(owner)
        assert gc.get_threshold() == (123, 5, 1000)
        with paused_gc():
            usual_full_collections()
        assert gc.get_threshold() == (123, 5, 6)
        with paused_gc():  # in a pause there are none
            seldom_full_collections(owner)
            assert gc.get_threshold() == (0, 5, 6)
    finally:
        gc.set_threshold(*before)


def test_after_an_error_the_next_save_brings_the_usual_back(tmp_path):
    before = gc.get_threshold()
    failed = Owner()
    seldom_full_collections(failed)  # and no step follows
    assert gc.get_threshold()[2] > before[2]
    torch_ckpt.save({"w": torch.ones(1)}, tmp_path / "a", no_dist=True)
    assert gc.get_threshold() == before


def test_garbage_does_not_grow_old_with_a_plan():
    owner, garbage = Owner(), Owner()
    held = weakref.ref(garbage)
    seldom_full_collections(owner)
    garbage.itself = garbage
    del garbage
    usual_full_collections()
    assert held() is None


def test_a_failed_save_lets_its_tensors_go(tmp_path):
    # The error refers to itself, so it goes with a collection; a young one must do.
    state = {"a": torch.ones(4), "b": torch.eye(2).to_sparse()}
    held = weakref.ref(state["a"])
    with contextlib.suppress(CheckpointError):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not (tmp_path / "c").exists()
    del state
    gc.collect(1)
    assert held() is None
