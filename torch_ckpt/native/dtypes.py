"""torch dtypes and their safetensors names."""

from __future__ import annotations

import torch

_PAIRS = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",  # two elements to a torch element
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# Older torches lack a few. F6_E2M3 and F6_E3M2 have no torch dtype at all.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _PAIRS.items()
    if hasattr(torch, attribute)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# Elements of the safetensors header per element of the torch tensor, in the last dimension.
PACKED: dict[str, int] = {"F4": 2}


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """True if every value of `source` is a value of `target`."""
    if source == target:
        return True
    if target == torch.float8_e8m0fnu:
        return False  # powers of two: neither 0 nor a sign
    if source.is_complex:
        return target == torch.complex128
    if source == torch.bool:
        return True
    if source.is_floating_point:
        if target.is_complex:
            return widens(source, torch.float64 if target == torch.complex128 else torch.float32)
        if not target.is_floating_point:
            return False
        a, b = torch.finfo(source), torch.finfo(target)
        if b.bits <= a.bits:
            return False
        return a.max <= b.max and a.eps >= b.eps and a.smallest_normal >= b.smallest_normal
    if target.is_floating_point or target.is_complex or target == torch.bool:
        # Exact only where the mantissa holds every integer.
        if target == torch.bool:
            return False
        real = torch.float64 if target in (torch.float64, torch.complex128) else target
        if target == torch.complex64:
            real = torch.float32
        info = torch.iinfo(source)
        return (2.0 / torch.finfo(real).eps) >= float(info.max)
    a_int, b_int = torch.iinfo(source), torch.iinfo(target)
    return b_int.min <= a_int.min and b_int.max >= a_int.max
