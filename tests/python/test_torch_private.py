"""What we use of torch's private names does what we use it for, in the torch that is here."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_ckpt.native import torch_private as private

pytestmark = pytest.mark.usefixtures("group")


def sharded() -> DTensor:
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)], run_check=False)


def test_the_part_of_a_dtensor_is_its_own_memory() -> None:
    tensor = sharded()
    private.local_tensor(tensor).fill_(7)
    assert (tensor.to_local() == 7).all()


def test_a_dtensor_is_made_of_a_part_inside_a_storage() -> None:
    storage = torch.arange(100.0)
    made = private.dtensor_of(storage[40:46].view(2, 3), sharded())
    assert made.shape == (2, 3) and made.placements == (Shard(0),)
    assert made.to_local().tolist() == [[40, 41, 42], [43, 44, 45]]
    again = pickle.loads(pickle.dumps(made))
    assert again.to_local().tolist() == made.to_local().tolist()


def test_storages_have_numbers() -> None:
    tensor = torch.zeros(4)
    assert private.storage_number(tensor) == private.storage_number(tensor[2:])
    assert private.storage_number(tensor) != private.storage_number(tensor.clone())


def test_a_group_has_a_store() -> None:
    for store in (private.store_of(None), private.store_of(dist.group.WORLD)):
        store.set("torch_ckpt/test", "here")
        assert store.get("torch_ckpt/test") == b"here"


def test_sharded_tensors_are_made_and_flattened() -> None:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    shard = private.Shard.from_tensor_and_offsets(torch.ones(2, 2), [0, 0], 0)
    tensor = init_from_local_shards([shard], 2, 2)
    assert isinstance(tensor, private.ShardedTensor)
    twin = private.sharded_tensor_like([torch.zeros(2, 2)], tensor)
    assert twin.metadata() == tensor.metadata()
    assert not twin.local_shards()[0].tensor.any()
    assert private.flatten_sharded_tensors({"t": tensor})["t"] is tensor


def test_items_and_chunks_are_made_by_stocks_helpers() -> None:
    (item,) = private.create_write_items("t", torch.ones(2, 2))
    assert item.type is WriteItemType.TENSOR and item.index.fqn == "t"
    (chunk,) = private.create_chunk_list(torch.ones(2, 2))
    assert (chunk.offsets, chunk.sizes) == (torch.Size([0, 0]), torch.Size([2, 2]))
    one, other = SavePlan([item]), SavePlan([])
    assert private.compare_save_plans(one, one) and not private.compare_save_plans(one, other)


@pytest.mark.parametrize("whole", [True, False])
def test_holes_are_found(whole: bool) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    if whole:
        chunks.append(ChunkStorageMetadata(torch.Size([2]), torch.Size([2])))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks)
    found: Any = private.validate_global_plan([SavePlan([])] * 2, Metadata({"t": entry}))
    assert (found is True or found == []) == whole


def test_meta_tensors_of_a_target_get_memory() -> None:
    state: dict[str, Any] = {"t": torch.zeros(3, device="meta"), "n": 1}
    private.init_state_dict(state)
    assert state["t"].device.type == "cpu" and state["n"] == 1


def test_paths_are_walked_and_set() -> None:
    seen: dict[Any, Any] = {}
    state: dict[str, Any] = {"a": {"b": torch.ones(1)}, "c": 2}
    private.traverse_state_dict_v_2_3(state, lambda path, value: seen.update({path: value}))
    assert seen == {("a", "b"): torch.ones(1), ("c",): 2}
    state = {}
    private.set_element(state, ("a", "b"), 3)
    assert state == {"a": {"b": 3}}


def test_the_rest_is_there() -> None:
    assert private.SHARDED_DIR_NAME == "sharded"
    info = private.HFStorageInfo("file", torch.Size([2]), torch.float32)
    assert (info.relative_path, info.shape, info.dtype) == ("file", torch.Size([2]), torch.float32)
    assert private.StridedShard(0, split_factor=2).split_factor == 2
    assert not private.is_wrapper(torch.ones(1))
    assert hasattr(private.AsyncCollectiveTensor, "wait")


def test_what_is_behind_a_subclass() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *ignored: Any) -> Any:
            raise AssertionError

    base = torch.ones(2)
    with torch._C.DisableTorchFunctionSubclass():
        own = base.as_subclass(Own)  # type: ignore[arg-type]
    plain = private.without_functions(own)
    assert type(plain) is torch.Tensor and plain.data_ptr() == base.data_ptr()
    assert private.is_fake(private.without_elements([2], torch.float32))
    assert not private.is_fake(base)
