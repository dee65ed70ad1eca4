"""How to save and load: options. And what saves in the background are run by."""

from torch_ckpt.megatron.async_calls import get_async_strategy
from torch_ckpt.megatron.strategies import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

__all__ = [
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "get_async_strategy",
]
