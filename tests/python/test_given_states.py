"""What planners are given of a state dict, and that they are as they were after a save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_states import assert_same, load_ours
from torch.distributed.checkpoint import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import SavePlanner


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    torch_ckpt.save(state, checkpoint_id=path, **options)


def async_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    saving = torch_ckpt.async_save(state, checkpoint_id=path, **options)
    assert isinstance(saving, torch_ckpt.AsyncSave)
    saving.result()


pytestmark = pytest.mark.usefixtures("group")


class Renames:
    """As the documentation of stock's SavePlanner has it."""

    given: Any

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.given = state_dict
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)  # type: ignore[misc]


class Renaming(Renames, DefaultSavePlanner):
    pass


class RenamingOurs(Renames, SavePlanner):
    pass


class OfOldTorch(Renaming):
    """Without storage_meta."""

    def set_up_planner(self, state_dict: Any, is_coordinator: bool = False) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


@pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")
@pytest.mark.parametrize("planner", [Renaming, RenamingOurs, OfOldTorch])
@pytest.mark.parametrize("call", [save, async_save])
def test_a_planner_is_given_the_state_itself(
    tmp_path: Path, call: Callable[..., None], planner: type
) -> None:
    state = {"a": torch.arange(3.0), "b": {"c": torch.ones(2)}}
    made = planner()
    for number in range(2):
        call(state, tmp_path / str(number), planner=made)
        assert type(made.given) is dict
        assert made.given.keys() == state.keys()
        wanted = {f"foo_{key}": value for key, value in state.items()}
        assert_same(load_ours(tmp_path / str(number), wanted), wanted)


@pytest.mark.parametrize("call", [save, async_save])
def test_a_planner_is_as_it_was(tmp_path: Path, call: Callable[..., None]) -> None:
    given = []
    planner = SavePlanner()
    own = planner.set_up_planner

    def set_up_planner(
        state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        given.append(state_dict)
        own(state_dict, storage_meta, is_coordinator)

    planner.set_up_planner = set_up_planner  # type: ignore[method-assign]
    call({"a": torch.ones(1)}, tmp_path / "c", planner=planner)
    assert [list(state) for state in given] == [["a"]]
    assert planner.set_up_planner is set_up_planner


@pytest.mark.parametrize("call", [save, async_save])
def test_a_planner_is_as_it_was_after_a_failure(tmp_path: Path, call: Callable[..., None]) -> None:
    planner = SavePlanner()
    with pytest.raises(torch_ckpt.CheckpointError, match=r"x\.y"):
        call({"x.y": torch.ones(1), "x": {"y": torch.ones(1)}}, tmp_path / "c", planner=planner)
    call({"a": torch.ones(1)}, tmp_path / "c", planner=planner)


@pytest.mark.parametrize("call", [save, async_save])
def test_of_the_type_of_the_state_itself_nothing_is_written(
    tmp_path: Path, call: Callable[..., None]
) -> None:
    """As with stock, whose calls make a dict of it."""
    call(OrderedDict(a=torch.ones(1)), tmp_path / "c")
    assert not list((tmp_path / "c").glob("objects*"))


class Stateful:
    def __init__(self) -> None:
        self.value = torch.arange(4.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.parametrize("call", [save, async_save])
def test_statefuls_are_asked_for_their_state(tmp_path: Path, call: Callable[..., None]) -> None:
    call({"model": Stateful(), "a": torch.ones(1)}, tmp_path / "c")
    other = Stateful()
    other.value = torch.zeros(4)
    torch_ckpt.load({"model": other}, checkpoint_id=tmp_path / "c")
    assert torch.equal(other.value, torch.arange(4.0))


@pytest.mark.parametrize("call", [save, async_save])
@pytest.mark.parametrize("state", [[torch.ones(2)], ["ab"], torch.ones(2), (1, 2)])
def test_what_is_no_state_is_refused(tmp_path: Path, state: Any, call: Any) -> None:
    """`dict()` would make {"a": "b"} of one of them."""
    kind = type(state).__name__
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=f"this is a {kind}: give it a name"):
        call(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=f"this is a {kind}: give it a name"):
        torch_ckpt.load(state, tmp_path / "c")


class Counter:
    def __init__(self, step: int) -> None:
        self.step = step
        self.weights = torch.full((2,), float(step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize("call", [save, async_save])
def test_a_module_or_what_has_a_state_dict_is_saved_and_loaded(tmp_path: Path, call: Any) -> None:
    module = torch.nn.Linear(3, 2)
    call(module, tmp_path / "module")
    other = torch.nn.Linear(3, 2)
    assert torch_ckpt.load(other, tmp_path / "module") is other
    assert_same(dict(other.state_dict()), dict(module.state_dict()))
    call(Counter(5), tmp_path / "counter")
    counter = Counter(0)
    torch_ckpt.load(counter, tmp_path / "counter")
    assert counter.step == 5 and counter.weights.tolist() == [5, 5]
