"""What torch does not promise: every private name of torch that this package uses, under a plain
name, so that a torch which changes one breaks here and in tests/python/test_torch_private.py.

Not here are the private methods that our planners, writer and reader override, or that subclasses
of stock's do: those are names of ours as well.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint import _storage_utils as storage_choice
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files as stock_consolidate,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank as stock_consolidate_on_every_rank,
)
from torch.distributed.checkpoint._hf_utils import SHARDED_DIR_NAME
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo as HFStorageInfo
from torch.distributed.checkpoint._sharded_tensor_utils import (
    _flatten_sharded_tensors as flatten_sharded_tensors,
)
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan as validate_global_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import (
    _compare_save_plans as compare_save_plans,
)
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list as create_chunk_list,
)
from torch.distributed.checkpoint.planner_helpers import (
    _create_write_items as create_write_items,
)
from torch.distributed.checkpoint.planner_helpers import (
    _init_state_dict as init_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import (
    _ProcessBasedAsyncCheckpointExecutor as ProcessExecutor,
)
from torch.distributed.checkpoint.state_dict_saver import (
    _ThreadBasedAsyncCheckpointExecutor as ThreadExecutor,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "SHARDED_DIR_NAME",
    "AsyncCollectiveTensor",
    "HFStorageInfo",
    "LocalShardsWrapper",
    "ProcessExecutor",
    "Shard",
    "ShardedTensor",
    "StorageInfo",
    "StridedShard",
    "ThreadExecutor",
    "compare_save_plans",
    "create_chunk_list",
    "create_write_items",
    "dispatch_in_mode",
    "dtensor_of",
    "flatten_sharded_tensors",
    "in_dispatch_mode",
    "init_state_dict",
    "is_fake",
    "is_wrapper",
    "local_tensor",
    "own_word",
    "set_element",
    "sharded_tensor_like",
    "stocks_cached_plans",
    "timeout_of",
    "stock_consolidate",
    "stock_consolidate_on_every_rank",
    "storage_choice",
    "storage_number",
    "store_of",
    "traverse_state_dict_v_2_3",
    "validate_global_plan",
    "without_elements",
    "without_functions",
]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part, as it is: `to_local` waits, and makes a view for autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


_EMPTY: dict[torch.dtype, torch.Tensor] = {}


def sharded_in_order(tensor: DTensor) -> bool:
    """Whether its placements say all about how it is sharded: mesh dimensions that shard one
    dimension do so from left to right, but where strided placements say otherwise.

    No placement tells an order that was asked for of plain ones. Torch 2.10 also has an order of
    strided ones, as those of FSDP over tensor parallelism, which it makes of the placements.
    """
    spec = tensor._spec
    order = getattr(spec, "shard_order", None) or ()
    if all(list(dims) == sorted(dims) for _, dims in order):
        return True
    meant: bool = order == type(spec)(spec.mesh, spec.placements).shard_order
    return meant


def dtensor_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of mesh and placements as `like`, with this rank's part `local`.

    It can be pickled. torch gives one the storage offset of its local tensor, and takes one with an
    offset for a tensor with memory of its own, which it then reads: torch 2.13 crashes.
    """
    empty = _EMPTY.get(local.dtype)
    if empty is None:
        empty = _EMPTY[local.dtype] = torch.empty(0, dtype=local.dtype, device="cpu")
    tensor = DTensor(empty, like._spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def sharded_tensor_like(tensors: list[torch.Tensor], like: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor as `like`, with the local shards `tensors`."""
    shards = [
        Shard(tensor, shard.metadata)
        for tensor, shard in zip(tensors, like.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, like.metadata(), process_group=like._process_group
    )


def stocks_cached_plans(ranks: int) -> list[SavePlan] | None:
    """The final plans of all ranks that stock's planner has cached, in this process, of the last
    save of that many ranks. None where it has none, or those of several classes of planners."""
    cached = getattr(SavePlanner, "_cached_global_plan", {})  # newer than torch 2.10
    known = [plans for plans in cached.values() if len(plans) == ranks]
    return known[0] if len(known) == 1 else None


def without_elements(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor that takes no memory: `torch.save` under `skip_data` leaves room for it."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long

    with FakeTensorMode():
        return torch.empty(sizes, dtype=dtype, device="cpu")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a FakeTensor, or is made of some."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # takes long to import
    if fakes is None:
        return False
    if is_wrapper(tensor) and not tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        return False  # torch takes none of nothing for a mixture
    with torch._C.DisableTorchFunctionSubclass():
        return bool(fakes.is_fake(tensor))


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor of a subclass that says what tensors it is made of."""
    return bool(is_traceable_wrapper_subclass(value))


def in_dispatch_mode() -> bool:
    """Whether a mode, as that of fake tensors, says what operators do."""
    return _get_current_dispatch_mode() is not None


def dispatch_in_mode(op: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What the innermost mode makes of `op`, as where no kernel of ours is asked first."""
    types = [
        type(each)
        for each in torch.utils._pytree.tree_leaves((arguments, named))
        if type(each) is not torch.Tensor
    ]
    with _pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(op, types, arguments, named)


def own_word(tensor: torch.Tensor, name: str) -> Any:
    """Attribute `name` of a tensor, of whose class `__torch_function__` is not asked: that of a
    ShardedTensor refuses most."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(tensor, name)


def without_functions(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor in the memory of one of a subclass, whose own `__torch_function__` is not
    asked."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def storage_number(tensor: torch.Tensor) -> int:
    """The same for tensors of one storage, and no others."""
    number: int = tensor.untyped_storage()._cdata
    return number


def store_of(group: dist.ProcessGroup | None) -> Any:
    """The store of a process group, the default one if None."""
    if group is None:
        return distributed_c10d._get_default_store()
    return distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """The seconds that collectives of `group` may take; 0 where its backends do not say."""
    seconds = [0.0]
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            seconds.append(group._get_backend(device).options._timeout.total_seconds())
    return max(seconds)
