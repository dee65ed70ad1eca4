"""What a load does about keys that are asked for and not stored, or stored and not asked for."""

from torch_ckpt.megatron.strict import StrictHandling, parse_strict_flag

__all__ = ["StrictHandling", "parse_strict_flag"]
