"""Ranks that share in saving and loading: options."""

from torch_ckpt.megatron.strategies import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]
