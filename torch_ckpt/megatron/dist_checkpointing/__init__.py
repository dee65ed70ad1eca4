"""`megatron.core.dist_checkpointing` on the engine of torch_ckpt: its modules, names and calls.

    from torch_ckpt.megatron import dist_checkpointing

Classes of Megatron's own (ShardedTensor and its kin, strategies) are taken as they are.
"""

from torch_ckpt.megatron.config import check_is_distributed_checkpoint
from torch_ckpt.megatron.dist_checkpointing import (
    core,
    dict_utils,
    mapping,
    optimizer,
    serialization,
    strategies,
    utils,
    validation,
)
from torch_ckpt.megatron.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from torch_ckpt.megatron.leaves import LocalNonpersistentObject, ShardedObject, ShardedTensor

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "core",
    "dict_utils",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "mapping",
    "optimizer",
    "remove_sharded_tensors",
    "save",
    "serialization",
    "strategies",
    "utils",
    "validation",
]
