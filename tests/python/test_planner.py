"""SavePlanner and LoadPlanner: boxes of DTensors, keys and containers, values of single ranks."""

from __future__ import annotations

import io
import logging
import pickle
import re
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ckpt.dcp.flatten import (
    STRUCTURE_FQN,
    Flat,
    check_structure,
    describe_structure,
    merge_structures,
    rebuild,
)
from torch_ckpt.dcp.planner import LoadPlanner, PerRank, SavePlanner
from torch_ckpt.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)


@pytest.fixture(autouse=True)
def no_plans_of_earlier_tests():
    for name in vars(dcp.SavePlanner):
        if name.startswith("_cached_"):
            getattr(dcp.SavePlanner, name).clear()


class as_rank:
    """A process group of `world` ranks in which this process is `rank` and nobody else exists."""

    def __init__(self, rank, world):
        self.arguments = {"rank": rank, "world_size": world}

    def __enter__(self):
        dist.init_process_group("fake", store=FakeStore(), **self.arguments)

    def __exit__(self, *_):
        dist.destroy_process_group()


def world_of(mesh):
    return torch.Size(mesh).numel()


def dtensor(full, mesh_shape, placements):
    """The DTensor of `full` on this rank, its local part cut by torch's own placements."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    local = full
    for dim, (placement, place) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, mesh_shape[dim], with_padding=False)
            local = parts[place]
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


class Storage:
    """What a storage writer and reader do, in memory."""

    def __init__(self):
        self.data = {}
        self.metadata = None

    def save(self, states, make=SavePlanner, **kwargs):
        """Save states[r], a function of no arguments, as rank r of len(states)."""
        planners, plans = [], []
        for rank, state in enumerate(states):
            with as_rank(rank, len(states)):
                planner = make(**kwargs)
                planner._cached_plans_key = f"rank {rank}"  # one process plays all ranks
                planner.set_up_planner(state(), None, rank == 0)
                plans.append(planner.create_local_plan())
                planners.append(planner)
        plans = pickle.loads(pickle.dumps(plans))
        plans, self.metadata = planners[0].create_global_plan(plans)
        self.plans = []
        for planner, plan in zip(planners, plans, strict=True):
            plan = planner.finish_plan(pickle.loads(pickle.dumps(plan)))
            self.plans.append(plan)
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    self.data[item.index] = planner.resolve_data(item).getvalue()
                else:
                    data = planner.resolve_data(item)
                    assert data.shape == item.tensor_data.chunk.sizes
                    self.data[item.index] = data.detach().clone()
        self.metadata = pickle.loads(pickle.dumps(self.metadata))
        return self

    def load(self, state, make=LoadPlanner, rank=0, world=1, **kwargs):
        """Fill the state that the function `state` makes as `rank` of `world`; return it."""
        with as_rank(rank, world):
            target = state()
            planner = make(**kwargs)
            planner.set_up_planner(target, self.metadata, rank == 0)
            plan = planner.create_global_plan([planner.create_local_plan()])[0]
            for item in planner.finish_plan(plan).items:
                stored = self.data[item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(stored))
                    continue
                part = stored
                for dim, (start, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, size)
                tensor = planner.resolve_tensor(item).detach()
                assert tensor.shape == part.shape
                tensor.copy_(part)
                planner.commit_tensor(item, tensor)
        return target

    def whole(self, fqn):
        """The tensor `fqn`, put together from its chunks; every element must come exactly once."""
        entry = self.metadata.state_dict_metadata[fqn]
        full = torch.zeros(entry.size, dtype=entry.properties.dtype)
        count = torch.zeros(entry.size)
        for chunk in entry.chunks:
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            full[where] = self.data[MetadataIndex(fqn, chunk.offsets)]
            count[where] += 1
        assert torch.equal(count, torch.ones(entry.size))
        return full


LAYOUTS = {
    "shard": ((2,), [Shard(0)]),
    "uneven": ((3,), [Shard(0)]),
    "more ranks than rows": ((16,), [Shard(0)]),
    "strided alone": ((2,), [_StridedShard(0, split_factor=2)]),
    "strided alone uneven": ((2,), [_StridedShard(0, split_factor=3)]),
    "fsdp and tp": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp and tp uneven": ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    "nested uneven": ((3, 2), [Shard(0), Shard(0)]),
    "columns": ((2, 2), [Replicate(), Shard(1)]),
    "three dimensions": ((2, 2, 2), [Replicate(), Shard(1), _StridedShard(0, split_factor=2)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtensors_are_saved_and_loaded_as_their_true_boxes(layout):
    mesh, placements = LAYOUTS[layout]
    full = torch.arange(13.0 * 6).view(13, 6)
    world = world_of(mesh)
    storage = Storage().save([lambda: {"w": dtensor(full, mesh, placements)}] * world)
    assert torch.equal(storage.whole("w"), full)
    # Onto one rank, and onto every other layout.
    assert torch.equal(storage.load(lambda: {"w": torch.zeros(13, 6)})["w"], full)
    for other_mesh, other in LAYOUTS.values():
        for rank in {0, world_of(other_mesh) - 1}:
            with as_rank(rank, world_of(other_mesh)):
                expected = dtensor(full, other_mesh, other).to_local()

            def blank(mesh=other_mesh, placements=other):
                return {"w": dtensor(torch.zeros(13, 6), mesh, placements)}

            got = storage.load(blank, rank=rank, world=world_of(other_mesh))["w"]
            assert torch.equal(got._local_tensor, expected)


def test_stock_planner_is_wrong_where_ours_is_not():
    """Why boxes are split: with stock's one chunk a rank, other rows are loaded without a word."""
    full = torch.arange(8.0)

    def strided(values):
        return lambda: {"w": dtensor(values, (2,), [_StridedShard(0, split_factor=2)])}

    storage = Storage().save([lambda: {"w": full}])
    got = {
        make: storage.load(strided(torch.zeros(8)), make, world=2)["w"]._local_tensor.tolist()
        for make in (DefaultLoadPlanner, LoadPlanner)
    }
    assert got == {DefaultLoadPlanner: [0, 1, 2, 3], LoadPlanner: [0, 1, 4, 5]}
    with pytest.raises(ValueError, match="overlapping|validate"):
        Storage().save([strided(full)] * 2, make=DefaultSavePlanner)
    assert torch.equal(Storage().save([strided(full)] * 2).whole("w"), full)


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_dtensor_without_elements_is_not_lost(placements):
    states = [lambda: {"w": dtensor(torch.zeros(0, 4), (2,), placements)}] * 2
    storage = Storage().save(states)
    assert storage.metadata.state_dict_metadata["w"].size == (0, 4)
    assert storage.load(lambda: {"w": torch.ones(0, 4)})["w"].shape == (0, 4)


def test_partial_placement_is_refused_by_name():
    def state():
        mesh = init_device_mesh("cpu", (2,))
        return {"a": {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}}

    with pytest.raises(UnsupportedError, match=r"^a\.w: .*Partial\(sum\)"):
        Storage().save([state] * 2)
    with pytest.raises(UnsupportedError, match=r"^a\.w: .*Partial\(sum\)"):
        Storage().save([lambda: {"a": {"w": torch.ones(2)}}]).load(state, world=2)


def test_ranks_outside_a_mesh_take_part_without_items():
    def state():
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], _init_backend=False)
        local = torch.ones(2) * dist.get_rank()
        return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}

    storage = Storage().save([state] * 3)
    assert [len(plan.items) for plan in storage.plans] == [1, 1, 0]
    assert storage.whole("w").tolist() == [0, 0, 1, 1]


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


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, PerRank):
        return same(a.value, b.value)
    return a == b


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
    ],
    ids=range(8),
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


def test_missing_key_is_an_error_unless_partial():
    storage = Storage().save([lambda: {"a": torch.ones(1)}])
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: b.") as caught:
        storage.load(lambda: {"a": torch.zeros(1), "b": 1})
    assert isinstance(caught.value, IncompleteError)
    loaded = storage.load(lambda: {"a": torch.zeros(1), "b": 1}, allow_partial_load=True)
    assert loaded == {"a": torch.ones(1), "b": 1}


def test_mismatches_name_the_leaf_and_both_sides(caplog):
    storage = Storage().save([lambda: {"a": {"t": torch.ones(2, 3)}, "o": 1}])
    with pytest.raises(ValueError, match=r"a\.t.*shape \[3, 2\].*has \[2, 3\]"):
        storage.load(lambda: {"a": {"t": torch.ones(3, 2)}})
    with pytest.raises(ValueError, match=r"^a\.t: .*object.*int.*\[2, 3\] and torch.float32"):
        storage.load(lambda: {"a": {"t": 1}})
    with caplog.at_level(logging.WARNING):
        assert storage.load(lambda: {"o": torch.ones(1)})["o"] == 1
    assert "o: the target has a tensor" in caplog.text


def test_meta_tensors_are_made_real():
    storage = Storage().save([lambda: {"a": {"t": torch.ones(2)}}])
    assert storage.load(lambda: {"a": {"t": torch.ones(2, device="meta")}})["a"]["t"].tolist() == [
        1,
        1,
    ]


def test_checkpoints_named_as_torch_2_3_did():
    """Up to torch 2.3 a dict without tensors was one leaf."""
    storage = Storage()
    storage.save(
        [lambda: {"a": {"t": torch.ones(1)}, "g": {"lr": 0.1, 5: 2}}], flatten_state_dict=False
    )
    storage.save(
        [lambda: {"a.t": torch.ones(1), "g": {"lr": 0.1, "k": 2}}], flatten_state_dict=False
    )
    loaded = storage.load(lambda: {"a": {"t": torch.zeros(1)}, "g": {"lr": 0, "k": 0}})
    assert loaded == {"a": {"t": torch.ones(1)}, "g": {"lr": 0.1, "k": 2}}


def test_values_that_differ_between_ranks_are_named(caplog):
    def state():
        rank = dist.get_rank()
        return {"a": {"step": rank}, "same": {"b", "c"}, "own": PerRank(rank), "odd": object}

    with caplog.at_level(logging.WARNING):
        storage = Storage().save([state] * 3)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1 and warned[0].startswith(
        "a.step: this value differs between ranks 0 and 1"
    )
    assert storage.load(lambda: {"a": {"step": None}})["a"]["step"] == 0


def test_replicas_are_spread_by_bytes_and_objects_stay_low():
    def state():
        return {f"t{i}": torch.ones(10) for i in range(6)} | {"o": 1}

    counts = [[item.type for item in plan.items] for plan in Storage().save([state] * 3).plans]
    assert [kinds.count(WriteItemType.TENSOR) for kinds in counts] == [2, 2, 2]
    assert [kinds.count(WriteItemType.BYTE_IO) for kinds in counts] == [1, 0, 0]
    lowest = Storage().save([state] * 3, dedup_save_to_lowest_rank=True).plans
    assert [len(plan.items) for plan in lowest] == [7, 0, 0]


def shard_item(fqn, offset, length, total, dtype=torch.float32):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    offsets = torch.Size([offset])
    chunk = ChunkStorageMetadata(offsets, torch.Size([length]))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size([total]))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, None, data)


@pytest.mark.parametrize(
    "items, word",
    [
        ([("w", 0, 4, 8), ("w", 5, 3, 8)], "invalid fill|validate"),
        ([("w", 0, 5, 8), ("w", 4, 4, 8)], "overlapping|validate"),
        ([("w", 0, 4, 8), ("w", 6, 4, 8)], "out of bounds|validate"),
        ([("w", 0, 4, 8), ("w", 4, 4, 9)], "w: ranks disagree"),
        ([("w", 0, 4, 8), ("w", 4, 4, 8, torch.float16)], "w: ranks disagree"),
    ],
    ids=range(5),
)
def test_pieces_that_do_not_make_a_tensor_are_an_error(items, word):
    planner = SavePlanner()
    plans = [SavePlan([shard_item(*item)], planner_data={}) for item in items]
    with pytest.raises(ValueError, match=word):
        planner.create_global_plan(plans)


def test_cached_plans_follow_what_changed():
    size, key = [4], [1]

    def states(rank):
        return lambda: {
            "t": torch.ones(size[0]),
            "d": {key[0]: rank if rank else 7},
            "own": PerRank(rank),
        }

    both = [states(0), states(1)]
    first = Storage().save(both, enable_plan_caching=True)
    again = Storage().save(both, enable_plan_caching=True)
    assert [len(plan.items) for plan in again.plans] == [len(plan.items) for plan in first.plans]
    assert same(
        again.load(dict, rebuild=True, world=2),
        {"t": torch.ones(4), "d": {1: 7}, "own": PerRank(0)},
    )
    size[0] = 6
    assert Storage().save(both, enable_plan_caching=True).whole("t").shape == (6,)
    key[0] = "1"  # the items are equal, what the keys are is not
    changed = Storage().save(both, enable_plan_caching=True)
    assert list(changed.load(dict, rebuild=True, world=2)["d"]) == ["1"]


def test_cached_plans_follow_a_change_of_dtype():
    planner_args = {"enable_plan_caching": True}
    Storage().save([lambda: {"t": torch.ones(2)}], **planner_args)
    storage = Storage().save([lambda: {"t": torch.ones(2, dtype=torch.float16)}], **planner_args)
    assert storage.metadata.state_dict_metadata["t"].properties.dtype is torch.float16


def test_metadata_and_items_are_those_of_stock():
    def state():
        return {
            "a": {"t": torch.ones(2, 3), "s": torch.tensor(1), "e": torch.ones(0)},
            "o": 1,
            "p": torch.nn.Parameter(torch.ones(2)),
        }

    ours, stock = Storage().save([state] * 2), Storage().save([state] * 2, make=DefaultSavePlanner)
    assert ours.metadata == stock.metadata
    assert ours.data.keys() == stock.data.keys()


def test_tensors_that_are_alike_share_their_description():
    state = {
        "a": torch.zeros(2, 3),
        "b": torch.ones(2, 3),
        "other shape": torch.ones(3, 2),
        "other dtype": torch.ones(2, 3, dtype=torch.float16),
        "with grad": torch.ones(2, 3, requires_grad=True),
    }
    planner = SavePlanner()
    planner.set_up_planner(state, None, True)
    data = {item.index.fqn: item.tensor_data for item in planner.create_local_plan().items}
    assert data["a"] is data["b"]
    # Made without their constructors, they are what those would have made.
    for item in planner.create_local_plan().items:
        index = MetadataIndex(item.index.fqn, item.index.offset, 0)
        whole = WriteItem(index, WriteItemType.TENSOR, None, data[index.fqn])
        assert vars(item.index) == vars(index)
        assert vars(item) == vars(whole)
    assert len({id(of_tensor) for of_tensor in data.values()}) == 4
    for fqn, tensor in state.items():
        assert data[fqn].size == data[fqn].chunk.sizes == tensor.shape, fqn
        assert data[fqn].properties == TensorProperties.create_from_tensor(tensor), fqn


def test_hooks_of_subclasses_are_called():
    class Half(SavePlanner):
        def transform_object(self, write_item, object):
            value = super().transform_object(write_item, object)
            return value.half() if isinstance(value, torch.Tensor) else value

    class Double(LoadPlanner):
        def lookup_tensor(self, index):
            seen.append(index.fqn)
            return super().lookup_tensor(index)

    seen = []
    storage = Storage().save([lambda: {"a": torch.ones(2)}], make=Half)
    assert storage.data[MetadataIndex("a", [0])].dtype is torch.float16
    storage.load(lambda: {"a": torch.zeros(2)}, make=Double)
    assert seen == ["a"]


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


def test_objects_can_be_given_without_pickle():
    planner = LoadPlanner(strict_dtype=True)
    assert planner.strict_dtype
    target = {"a": {1: None}, "r": PerRank(), "frozen": [torch.ones(1), None]}
    storage = Storage().save([lambda: {"a": {1: 5}, "r": PerRank(6), "frozen": [torch.ones(1), 7]}])
    planner.set_up_planner(target, storage.metadata, True)
    for item in planner.create_local_plan().items:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_object(item, item.dest_index.fqn)
    assert target["a"] == {1: "a.1"} and target["r"].value == "r.__rank_0_of_1__"
    assert target["frozen"][1] == "frozen.1"


def test_planners_pickle():
    save = SavePlanner(enable_plan_caching=True, rank=1, world_size=2)
    save.set_up_planner({"a": {1: torch.ones(1)}}, None, True)
    assert (
        pickle.loads(pickle.dumps(save)).create_local_plan().items == save.create_local_plan().items
    )
    load = pickle.loads(pickle.dumps(LoadPlanner(strict_dtype=True, rebuild=True)))
    assert load.strict_dtype and load.rebuild
    assert pickle.loads(pickle.dumps(PerRank([1]))).value == [1]
