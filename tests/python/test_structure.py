"""Nested state dicts: keys and containers that come back, values of single ranks."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from planner_storage import Storage, same
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)

import torch_ckpt
from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
)
from torch_ckpt.planning.flatten import (
    Flat,
    check_structure,
    describe_structure,
    merge_structures,
    rebuild,
)
from torch_ckpt.planning.per_rank import PerRank
from torch_ckpt.planning.reserved import STRUCTURE_FQN


def nested():
    return {
        "model": OrderedDict(w=torch.arange(4.0), b=torch.tensor(2)),
        "optim": {
            "state": {0: {"step": 3, "m": torch.ones(2)}, 10: {"step": 4, "m": torch.zeros(2)}}
        },
        "list": [torch.ones(1), {"x": 1}, [5, 6], {}],
        "empty": {},
        "gone": [],
        "pair": (1, torch.ones(1)),
        "none": None,
        "count": Counter(a=1),
        "by_type": defaultdict(list, {1.5: "a", (1, 2): torch.ones(3)}),
        "dots.in": {"a.b": 1},
    }


def blank():
    def wipe(value):
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, 77)
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, {k: wipe(v) for k, v in value.items()})
        if isinstance(value, dict):
            return type(value)({k: wipe(v) for k, v in value.items()})
        if isinstance(value, list):
            return [wipe(v) for v in value] if value else [1]
        return "old"

    return wipe(nested())


def test_nested_state_comes_back_in_place():
    storage = Storage().save([nested])
    assert same(storage.load(blank), nested())


def test_stock_puts_integer_keys_elsewhere():
    storage = Storage().save([lambda: {"a": {1: "new"}}], make=DefaultSavePlanner)
    assert storage.load(lambda: {"a": {1: "old"}}, make=DefaultLoadPlanner)["a"][1] == "old"
    assert storage.load(lambda: {"a": {1: "old"}})["a"] == {1: "new"}


def test_rebuild_into_an_empty_target():
    storage = Storage().save([nested])
    assert same(storage.load(dict, rebuild=True), nested())
    assert list(storage.load(dict, rebuild=True)) == list(nested())
    assert storage.load(dict) == {}
    plain = Storage().save([lambda: {"a": {"b": torch.ones(2)}, "c": [torch.ones(1)]}])
    assert STRUCTURE_FQN not in plain.metadata.planner_data
    assert same(plain.load(dict, rebuild=True), {"a": {"b": torch.ones(2)}, "c": [torch.ones(1)]})
    stock = Storage().save([nested], make=DefaultSavePlanner)
    assert torch.equal(stock.load(dict, rebuild=True)["model"]["w"], torch.arange(4.0))


def test_empty_container_takes_the_place_of_a_leaf():
    storage = Storage().save([lambda: {"a": {}, "b": defaultdict(int), "c": 1}])
    loaded = storage.load(lambda: {"a": None, "b": None, "c": None})
    assert same(loaded, {"a": {}, "b": defaultdict(int), "c": 1})


def test_names_are_those_of_stock_and_stock_loads_them():
    storage = Storage().save([nested])
    assert list(storage.metadata.state_dict_metadata) == list(flatten_state_dict(nested())[0])
    target = storage.load(blank, make=DefaultLoadPlanner)
    assert torch.equal(target["model"]["w"], torch.arange(4.0)) and target["pair"][0] == 1
    everything = storage.load(dict, make=_EmptyStateDictLoadPlanner)
    assert torch.equal(everything["model"]["w"], torch.arange(4.0))
    assert STRUCTURE_FQN not in everything and "torch_ckpt" not in everything


def test_structure_only_where_the_names_do_not_say_it():
    assert not Flat({"a": {"b": 1}, "c": [torch.ones(1)], "d": ()}, 0, 1).structured
    for state in ({1: 2}, {"a": {}}, OrderedDict(a=1), {"a": PerRank(1)}, {"a": [{}]}):
        assert Flat(state, 0, 1).structured, state
    planner = SavePlanner(keep_structure=False)
    planner.set_up_planner({1: 2}, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    assert len(plans[0].items) == 1 and STRUCTURE_FQN not in metadata.planner_data


def test_structures_of_ranks_are_united():
    stages = [
        lambda: {"layers": {0: torch.ones(1)}, "shared": {}},
        lambda: {"layers": {1: torch.ones(2)}, "shared": {}, "last": OrderedDict(x=1)},
    ]
    storage = Storage().save(stages)
    expected = {
        "layers": {0: torch.ones(1), 1: torch.ones(2)},
        "shared": {},
        "last": OrderedDict(x=1),
    }
    loaded = storage.load(dict, rebuild=True)
    assert same(loaded["layers"], expected["layers"]) and same(loaded["last"], expected["last"])
    assert loaded["shared"] == {}


def test_structure_round_trip_without_planners():
    for state in (nested(), {1: {}, "a": [[{}]]}, {(): 1, None: {b"x": {True: {}}}}):
        flat = Flat(state, 0, 1)
        structure = merge_structures([None, describe_structure(state), describe_structure(state)])
        assert same(rebuild(flat.values, flat.paths, check_structure(structure)), state)


@pytest.mark.parametrize(
    "value",
    [
        {"version": 2, "containers": [], "per_rank": []},
        {"version": 1, "containers": []},
        {"version": 1, "containers": [[["a"], "dict"]], "per_rank": []},
        {"version": 1, "containers": [["a", "dict", []]], "per_rank": []},
        {"version": 1, "containers": [[["a"], "list", []]], "per_rank": []},
        {"version": 1, "containers": [[["a"], "dict", 3]], "per_rank": []},
        {"version": 1, "containers": 5, "per_rank": []},
        {"version": 1, "containers": [], "per_rank": [[[]]]},
        {"version": 1, "containers": [], "per_rank": [], "more": {}},
        {"version": 1, "containers": [], "per_rank": [], "tensors": []},
        {"version": 1, "containers": [], "per_rank": [], "tensors": {"w": 1}},
        {"version": 1, "containers": [], "per_rank": [], "tensors": {"w": {"class": "a"}}},
        {"version": 1, "containers": [], "per_rank": [], "tensors": {"w": {"inner": ["a"]}}},
        {
            "version": 1,
            "containers": [],
            "per_rank": [],
            "tensors": {"w": {"class": "a", "inner": [1]}},
        },
        {
            "version": 1,
            "containers": [],
            "per_rank": [],
            "tensors": {3: {"class": "a", "inner": ["a"]}},
        },
    ],
    ids=range(15),
)
def test_malformed_structure_is_corrupt(value):
    with pytest.raises(CorruptError, match=STRUCTURE_FQN):
        check_structure(value)


@pytest.mark.parametrize(
    "state, both",
    [
        ({"a.b": 1, "a": {"b": 2}}, (r"\['a.b'\]", r"\['a'\]\['b'\]")),
        ({"a": {1: 1, "1": 2}}, (r"\['a'\]\['1'\]", r"\['a'\]\['1'\]")),
        ({"a": [torch.ones(1)], "a.0": 2}, (r"\['a'\]\[0\]", r"\['a.0'\]")),
        ({"a": PerRank(1), "a.__rank_0_of_1__": 2}, (r"\['a'\]", "__rank_0_of_1__")),
    ],
    ids=range(4),
)
def test_two_leaves_of_one_name_are_refused_with_both_paths(state, both):
    with pytest.raises(InvalidArgumentError, match="^a.*two leaves") as caught:
        SavePlanner().set_up_planner(state, None, True)
    for path in both:
        assert re.search(path, str(caught.value))


def test_reserved_name_is_refused():
    with pytest.raises(InvalidArgumentError, match="reserved"):
        SavePlanner().set_up_planner({"torch_ckpt": {"structure": 1}}, None, True)
    with pytest.raises(InvalidArgumentError, match="same text"):
        SavePlanner().set_up_planner({"a": {1: {}, "1": {}}}, None, True)


def per_rank_state():
    rank = dist.get_rank()
    return {"rng": PerRank({"seed": rank}), "t": PerRank(torch.full((rank + 1,), rank)), "x": 1}


def test_per_rank_values_come_back_to_their_rank():
    storage = Storage().save([per_rank_state] * 3)
    assert "rng.__rank_2_of_3__" in storage.metadata.state_dict_metadata
    for rank in range(3):
        loaded = storage.load(
            lambda r=rank: {"rng": PerRank(), "t": PerRank(torch.zeros(r + 1, dtype=torch.long))},
            rank=rank,
            world=3,
        )
        assert loaded["rng"].value == {"seed": rank}
        assert loaded["t"].value.tolist() == [rank] * (rank + 1)
        rebuilt = storage.load(dict, rank=rank, world=3, rebuild=True)
        assert rebuilt["rng"].value == {"seed": rank} and rebuilt["x"] == 1
        assert rebuilt["t"].value.tolist() == [rank] * (rank + 1)


def test_per_rank_values_need_as_many_ranks():
    storage = Storage().save([per_rank_state] * 3)
    for partial in (False, True):
        with pytest.raises(InvalidArgumentError, match=r"^rng: .*by 3 ranks.*by 2;"):
            storage.load(lambda: {"rng": PerRank()}, world=2, allow_partial_load=partial)
    with pytest.raises(IncompleteError, match="rng.*saved as PerRank"):
        storage.load(lambda: {"rng": None})
    with pytest.raises(IncompleteError, match="x.*not as PerRank"):
        storage.load(lambda: {"x": PerRank()})
    with pytest.raises(InvalidArgumentError, match="^a: a PerRank cannot"):
        SavePlanner().set_up_planner({"a": PerRank(PerRank())}, None, True)
    planner = SavePlanner(rank=1, world_size=2)
    planner.set_up_planner({"a": PerRank(5)}, None, True)
    assert planner.state_dict == {"a.__rank_1_of_2__": 5}


def test_through_stock_file_storage(tmp_path):
    dcp.save(
        nested(), storage_writer=dcp.FileSystemWriter(tmp_path), planner=SavePlanner(), no_dist=True
    )
    target = blank()
    dcp.load(
        target, storage_reader=dcp.FileSystemReader(tmp_path), planner=LoadPlanner(), no_dist=True
    )
    assert same(target, nested())
    planner = LoadPlanner(rebuild=True)
    dcp.load({}, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert same(planner.original_state_dict, nested())


def test_a_state_dict_that_contains_itself(tmp_path):
    state = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(InvalidArgumentError, match=r"state_dict\['a'\]\['b'\] is what it lies in"):
        Flat(state, 0, 1)
    listed = [torch.ones(1), 5]
    listed[1] = (1, listed)
    with pytest.raises(CheckpointError, match=r"b\.1"):
        torch_ckpt.save({"a": {}, "b": listed}, tmp_path / "c")
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(InvalidArgumentError, match="too deeply"):
        Flat(deep, 0, 1)


def test_what_can_be_saved_can_be_loaded_however_deep(tmp_path):
    state: dict[str, Any] = {"w": torch.ones(2), "empty": {}}
    for number in range(700):
        state = {number % 3: state}
    torch_ckpt.save(state, tmp_path / "c")
    loaded = torch_ckpt.load(path=tmp_path / "c")
    for number in reversed(range(700)):
        loaded = loaded[number % 3]
    assert loaded["w"].tolist() == [1, 1] and loaded["empty"] == {}


def test_keys_with_one_text_are_both_shown():
    for first, second in ((0, "0"), ("0", 0)):
        with pytest.raises(InvalidArgumentError) as caught:
            Flat({"a": {first: 1, second: 2}}, 0, 1)
        assert f"state_dict['a'][{first!r}] and" in str(caught.value)
        assert f"state_dict['a'][{second!r}];" in str(caught.value)


@pytest.mark.parametrize(
    "paths",
    [
        {"t": ("m",), "u": ("m", "a")},
        {"t": ("m", "a"), "u": ("m", "a")},
        {"t": (0,), "u": (1,)},
    ],
    ids=["below a leaf", "twice", "no mapping"],
)
def test_paths_that_contradict_each_other(paths):
    with pytest.raises(CorruptError):
        rebuild({"t": 1, "u": 2}, paths, None)


@pytest.mark.parametrize("at", [[], ["m"]], ids=["root", "names"])
def test_a_structure_that_contradicts_the_paths(at):
    structure = {"version": 1, "containers": [[at, "list", 3]], "per_rank": []}
    with pytest.raises(CorruptError, match="can be no list"):
        rebuild({"t": 1}, {"t": ("m", "a")}, check_structure(structure))


def test_nested_too_deeply_to_be_rebuilt():
    with pytest.raises(InvalidArgumentError, match="too deeply"):
        rebuild({"t": 1}, {"t": ("a",) * 3000}, None)


def test_a_leaf_with_the_name_of_a_per_rank_value():
    state = {"a": PerRank(1), "a.__rank_5_of_9__": 7}
    with pytest.raises(InvalidArgumentError, match="belongs to a, which is a PerRank"):
        Flat(state, 0, 1)
    Flat({"b": PerRank(1), "a.__rank_5_of_9__": 7}, 0, 1)
