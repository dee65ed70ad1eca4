"""torch_ckpt.megatron.dist_checkpointing against megatron-core: the same calls, the same answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.megatron.dist_checkpointing import dict_utils, mapping, optimizer, utils
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException

pytest.importorskip("megatron.core.dist_checkpointing")
from megatron.core.dist_checkpointing import dict_utils as their_dict_utils
from megatron.core.dist_checkpointing import mapping as their_mapping
from megatron.core.dist_checkpointing import optimizer as their_optimizer
from megatron.core.dist_checkpointing import utils as their_utils
from megatron.core.dist_checkpointing.core import (
    CheckpointingException as TheirException,
)

LEAVES = st.one_of(st.integers(-2, 2), st.sampled_from(["a", "b", None, (1, 2), 0.5]))
KEYS = st.one_of(st.sampled_from("abc"), st.integers(0, 2))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)
CONTAINERS = TREES.filter(lambda tree: isinstance(tree, dict | list))


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or that it raises. Their bare asserts are errors of ours, too."""
    try:
        return call()
    except (CheckpointingException, TheirException):
        return CheckpointingException
    except ValueError:
        return ValueError
    except IndexError:
        return IndexError


@given(CONTAINERS, st.booleans())
def test_extract_matching_values(tree: Any, as_dicts: bool) -> None:
    def is_number(value: Any) -> bool:
        return isinstance(value, int)

    ours = dict_utils.extract_matching_values(tree, is_number, as_dicts)
    assert ours == their_dict_utils.extract_matching_values(tree, is_number, as_dicts)


@given(TREES, TREES)
def test_merge(a: Any, b: Any) -> None:
    ours = outcome(lambda: dict_utils.merge(copy.deepcopy(a), copy.deepcopy(b)))
    assert ours == outcome(lambda: their_dict_utils.merge(copy.deepcopy(a), copy.deepcopy(b)))


@given(CONTAINERS)
def test_maps_and_values(tree: Any) -> None:
    def shown(value: Any) -> str:
        return f"<{value}>"

    ours, theirs = copy.deepcopy(tree), copy.deepcopy(tree)
    assert list(dict_utils.nested_values(tree)) == list(their_dict_utils.nested_values(tree))
    assert dict_utils.dict_list_map_outplace(shown, tree) == (
        their_dict_utils.dict_list_map_outplace(shown, tree)
    )
    assert dict_utils.dict_list_map_inplace(shown, ours) is ours
    assert ours == their_dict_utils.dict_list_map_inplace(shown, theirs)


PLAIN = LEAVES.filter(lambda leaf: not isinstance(leaf, tuple))  # of which theirs asserts


@given(st.dictionaries(KEYS, PLAIN), st.dictionaries(KEYS, PLAIN))
def test_diff_of_dicts(a: Any, b: Any) -> None:
    ours, theirs = dict_utils.diff(a, b), their_dict_utils.diff(a, b)
    for mine, their in zip(ours, theirs, strict=True):
        assert sorted(mine, key=repr) == sorted(their, key=repr)


def test_diff_of_arrays_and_sharded_leaves() -> None:
    def tree(value: float, kinds: Any) -> dict[str, Any]:
        data = torch.full((2,), value)
        return {
            "array": np.full(3, value),
            "tensor": kinds.ShardedTensor.from_rank_offsets("w", data),
            "object": kinds.ShardedObject("o", {"x": value}, (1,), (0,)),
        }

    assert dict_utils.diff(tree(1.0, mapping), tree(1.0, mapping)) == ([], [], [])
    paths = [path for path, *_ in dict_utils.diff(tree(1.0, mapping), tree(2.0, mapping))[2]]
    assert paths == [
        ("array",),
        ("tensor", mapping.ShardedTensor),
        ("object", mapping.ShardedObject, "x"),
    ]
    theirs = their_dict_utils.diff(tree(1.0, their_mapping), tree(2.0, their_mapping))[2]
    # Of arrays they name each element.
    assert {path[0] for path, *_ in theirs} == {path[0] for path in paths}
    assert dict_utils.diff(np.ones(2), np.ones(3))[2] == [((), np.ndarray, np.ndarray)]


@given(st.lists(st.integers(0, 9)))
def test_map_reduce(numbers: list[int]) -> None:
    def parity(number: int) -> int:
        return number % 2

    assert dict_utils.map_reduce(numbers, parity, str, sorted) == (
        their_dict_utils.map_reduce(numbers, parity, str, sorted)
    )


FIELDS = (
    *("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations"),
    *("replica_id", "prepend_axis_num", "allow_shape_mismatch", "flattened_range"),
)


def said(entry: Any) -> Any:
    if entry is CheckpointingException or isinstance(entry, type):
        return entry
    values = [getattr(entry, name) for name in FIELDS]
    return [tuple(each) if isinstance(each, torch.Size) else each for each in values]


@st.composite
def offsets(draw: Any) -> tuple[int, list[tuple[int, int, int]]]:
    prepended = draw(st.integers(0, 2))
    axes = draw(st.lists(st.integers(-1, prepended + 2), unique=True, max_size=3))
    return prepended, [(axis, draw(st.integers(-1, 4)), draw(st.integers(0, 4))) for axis in axes]


@given(offsets(), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_from_rank_offsets(where: tuple[int, list[tuple[int, int, int]]], shape: list[int]) -> None:
    prepended, places = where
    data = torch.zeros(shape)

    def made(kind: Any) -> Any:
        return outcome(
            lambda: kind.from_rank_offsets("k", data, *places, prepend_axis_num=prepended)
        )

    ours, theirs = made(mapping.ShardedTensor), made(their_mapping.ShardedTensor)
    assert said(ours) == said(theirs)
    if not isinstance(ours, type) and 0 not in shape:
        assert ours.local_chunk_offset_in_global() == theirs.local_chunk_offset_in_global()
        assert ours.has_regular_grid and ours.without_data().data is None
        (narrowed,), (their_narrowed,) = ours.narrow(1, 0, 1), theirs.narrow(1, 0, 1)
        assert said(narrowed) == said(their_narrowed)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"local_shape": (2, 2)},
        {"global_shape": (4,)},
        {"global_offset": (0,)},
        {"global_offset": (1, 0)},
        {"prepend_axis_num": 1},
        {"flattened_range": slice(0, 1)},
        {},
    ],
)
def test_errors_of_a_sharded_tensor(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "key": "k",
        "data": torch.zeros(2, 3),
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
        **changed,
    }
    ours = outcome(lambda: mapping.ShardedTensor(**fields))
    assert said(ours) == said(outcome(lambda: their_mapping.ShardedTensor(**fields)))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3))
def test_sharded_objects(grid: list[tuple[int, int]]) -> None:
    shape = tuple(size for size, _ in grid)
    offset = tuple(min(at, size - 1) for size, at in grid)
    ours = mapping.ShardedObject("k", 1, shape, offset)
    theirs = their_mapping.ShardedObject("k", 1, shape, offset)
    assert ours.unique_key == theirs.unique_key
    again = mapping.ShardedObject.empty_from_unique_key(ours.unique_key, 2)
    their_again = their_mapping.ShardedObject.empty_from_unique_key(ours.unique_key, 2)
    for name in ("key", "data", "global_shape", "global_offset", "replica_id"):
        assert getattr(again, name) == getattr(their_again, name)
    old = ours.unique_key.rpartition(".")[0] if len(shape) > 1 else None
    if old is not None:  # as old checkpoints named them
        assert mapping.ShardedObject.empty_from_unique_key(old).global_shape == (
            their_mapping.ShardedObject.empty_from_unique_key(old).global_shape
        )


@given(st.one_of(st.integers(-1, 2), st.tuples(st.integers(0, 1), st.integers(0, 1))))
def test_main_replicas(replica: Any) -> None:
    assert mapping.is_main_replica(replica) == their_mapping.is_main_replica(replica)


def entries(kinds: Any) -> dict[str, Any]:
    return {
        "t": kinds.ShardedTensor.from_rank_offsets("m.t", torch.zeros(2)),
        "in": [{"o": kinds.ShardedObject("m.o", 1, (1,), (0,))}, 5],
        "f": kinds.ShardedTensorFactory("m.f", torch.zeros(2), lambda *_: {}, lambda parts: parts),
        "own": kinds.LocalNonpersistentObject(1),
    }


def keys_of(tree: Any) -> list[str]:
    return [each.key for each in dict_utils.nested_values(tree) if hasattr(each, "key")]


def test_prefixes() -> None:
    for name, arguments in (
        ("add_prefix_for_sharding", ("p.",)),
        ("replace_prefix_for_sharding", ("m.", "n.")),
        ("replace_prefix_for_sharding", ("x.", "n.")),
        ("apply_prefix_mapping", ({"m.t": "a", "m.": "b."},)),
    ):
        ours, theirs = entries(mapping), entries(their_mapping)
        mine = outcome(lambda: getattr(utils, name)(ours, *arguments))  # noqa: B023
        assert mine == outcome(lambda: getattr(their_utils, name)(theirs, *arguments))  # noqa: B023
        if mine is None:
            assert keys_of(ours) == keys_of(theirs)


@pytest.mark.parametrize(
    "name",
    [
        "extract_sharded_tensors",
        "extract_sharded_tensors_and_factories",
        "extract_sharded_base",
        "extract_nonpersistent",
    ],
)
def test_extracts(name: str) -> None:
    def shape(tree: Any) -> Any:
        return dict_utils.dict_list_map_outplace(lambda leaf: type(leaf).__name__, tree)

    ours = getattr(utils, name)(entries(mapping))
    theirs = getattr(their_utils, name)(entries(their_mapping))
    assert [shape(tree) for tree in ours] == [shape(tree) for tree in theirs]


def test_states_of_optimizers() -> None:
    def made(kinds: Any, functions: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        adam = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        adam.step()
        state = {
            name: kinds.ShardedTensor.from_rank_offsets(f"m.{name}", parameter, (0, 1, 2))
            for name, parameter in model.named_parameters()
        }
        numbers = functions.get_param_id_to_sharded_param_map(state, model.parameters())
        of_adam = adam.state_dict()
        functions.optim_state_to_sharding_state(of_adam, numbers, exclude_keys=("step",))
        return of_adam

    ours, theirs = made(mapping, optimizer), made(their_mapping, their_optimizer)
    assert ours["state"].keys() == theirs["state"].keys() == {0, 1}
    for number, state in ours["state"].items():
        assert {kind: said(entry) for kind, entry in state.items()} == {
            kind: said(entry) for kind, entry in theirs["state"][number].items()
        }
    assert ours["param_groups"][0]["params"].unwrap() == [0, 1]
    rest = [
        {key: value for key, value in each["param_groups"][0].items() if key != "params"}
        for each in (ours, theirs)
    ]
    assert rest[0] == rest[1]
    with pytest.raises(ValueError, match="number 5"):
        optimizer.optim_state_to_sharding_state(
            {"state": {5: {"a": torch.zeros(1)}}, "param_groups": []}, {}
        )


def test_parameters_and_states_of_them() -> None:
    model = torch.nn.Linear(3, 2)
    given = [*model.parameters(), model.weight]

    def made(kinds: Any, functions: Any) -> list[Any]:
        numbers = functions.get_optim_param_to_id_map(given)
        entry = kinds.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))
        make = functions.make_sharded_optimizer_tensor
        moment = make(entry, torch.ones(2, 3, dtype=torch.bfloat16), "optimizer.state.exp_avg")
        factory = kinds.ShardedTensorFactory("f", torch.zeros(2), lambda *_: {}, sum)
        of_factory = make(factory, torch.ones(2), "optimizer")
        with pytest.raises((CheckpointingException, AssertionError), match=r"\(?\[?3, 3"):
            make(entry, torch.ones(3, 3), "optimizer")
        empty = entry.without_data()
        empty.init_data("cpu", torch.ones)
        filled = empty.data
        empty.init_data("cpu", torch.zeros)
        ids = [numbers[id(parameter)] for parameter in model.parameters()]
        assert empty.data is filled and filled.dtype == torch.float32 and filled.all()
        return [ids, said(moment), of_factory.key, of_factory.data.tolist(), filled.shape]

    ours, theirs = made(mapping, optimizer), made(their_mapping, their_optimizer)
    assert ours == theirs


def test_factories() -> None:
    for kinds in (mapping, their_mapping):
        tree = {"a": [kinds.ShardedTensorFactory("k", 1, lambda *_: {"x": 1, "y": 2}, sum), 4]}
        merges = {"a": {0: kinds.ShardedTensorFactory("k", None, lambda *_: 0, sum)}}
        kinds.apply_factories(tree)
        assert tree == {"a": [{"x": 1, "y": 2}, 4]}
        tree["a"][0] = [1, 2]
        assert kinds.apply_factory_merges(tree, merges) == {"a": [3, 4]}
        with pytest.raises(ValueError):
            kinds.apply_factory_merges({"b": 1}, merges)
