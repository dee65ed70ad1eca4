"""How to save and load: options."""

from torch_ckpt.megatron.dist_checkpointing.strategies import async_utils, fully_parallel, torch

__all__ = ["async_utils", "fully_parallel", "torch"]
