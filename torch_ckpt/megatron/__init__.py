"""Megatron Core's checkpoints on the engine of torch_ckpt.

`dist_checkpointing` has the modules of `megatron.core.dist_checkpointing` and the names that
programs use; `patch_megatron` puts its functions into the places of Megatron's. Nothing of Megatron
is imported before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ckpt.megatron.patch import MegatronPatch, patch_megatron

__all__ = ["MegatronPatch", "patch_megatron"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torch_ckpt.megatron' has no attribute '{name}'")
    from torch_ckpt.megatron import patch

    return getattr(patch, name)
