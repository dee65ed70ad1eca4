"""SavePlanner and LoadPlanner: boxes of DTensors, plans of several ranks, hooks, errors."""

from __future__ import annotations

import logging
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from planner_storage import Storage, as_rank, dtensor, world_of
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
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

from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.errors import (
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)
from torch_ckpt.planning.per_rank import PerRank

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
        ([("w", 0, 4, 8), ("w", 4, 4, 9)], r"'w': ranks disagree.*\[9\] on rank 1"),
        ([("w", 0, 4, 8), ("w", 4, 4, 8, torch.float16)], r"'w': ranks disagree.*float16"),
    ],
    ids=range(5),
)
def test_pieces_that_do_not_make_a_tensor_are_an_error(items, word):
    planner = SavePlanner()
    plans = [SavePlan([shard_item(*item)], planner_data={}) for item in items]
    with pytest.raises(ValueError, match=word):
        planner.create_global_plan(plans)


@pytest.mark.parametrize(
    "other, says",
    [
        (torch.ones(3), r"\[2\] and torch.float32 \[3\]"),
        (torch.ones(2).half(), r"torch.float16 \[2\]"),
        (5, "no tensor"),
    ],
    ids=["shape", "dtype", "object"],
)
def test_ranks_that_disagree_about_a_tensor(other, says):
    states = [lambda: {"x": torch.ones(2)}] * 2 + [lambda: {"x": other}]
    with pytest.raises(InvalidArgumentError, match="'x': ranks .*disagree") as caught:
        Storage().save(states)
    assert re.search(says, str(caught.value)), caught.value
    with pytest.raises(InvalidArgumentError, match="'x': ranks .*disagree"):
        Storage().save(states[::-1])


def without_strides(properties):
    """Of what torch 2.15 notes and never reads."""
    if hasattr(properties, "strides"):
        properties.strides = None
    return properties


def test_metadata_and_items_are_those_of_stock():
    def state():
        return {
            "a": {"t": torch.ones(2, 3), "s": torch.tensor(1), "e": torch.ones(0)},
            "o": 1,
            "p": torch.nn.Parameter(torch.ones(2)),
        }

    ours, stock = Storage().save([state] * 2), Storage().save([state] * 2, make=DefaultSavePlanner)
    for entry in stock.metadata.state_dict_metadata.values():
        without_strides(getattr(entry, "properties", None))
    assert ours.metadata == stock.metadata
    assert ours.data.keys() == stock.data.keys()


def test_metadata_that_is_shared_is_not_changed():
    """A second piece of a tensor that was taken for whole is an error of that tensor alone."""
    planner = SavePlanner()
    planner.set_up_planner({"a": torch.ones(4), "b": torch.ones(4)}, None, True)
    plan = planner.create_local_plan()
    _, metadata = planner.create_global_plan([plan])
    entries = metadata.state_dict_metadata
    assert entries["a"] is entries["b"] and len(entries["a"].chunks) == 1
    other = SavePlan([shard_item("b", 2, 2, 4)], planner_data={})
    plan = SavePlan(plan.items, planner_data={})
    with pytest.raises(ValueError, match="(?s)b.*(overlap|disagree)|validate"):
        planner.create_global_plan([plan, other])
    assert len(entries["a"].chunks) == 1


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
        stocks = without_strides(TensorProperties.create_from_tensor(tensor))
        assert data[fqn].properties == stocks, fqn


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
