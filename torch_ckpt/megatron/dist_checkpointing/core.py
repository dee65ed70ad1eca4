"""What a checkpoint's metadata.json says, and the error of these modules."""

from torch_ckpt.megatron.config import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]
