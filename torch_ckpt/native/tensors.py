"""Where the elements of a tensor are: in memory that the engine can copy from or into, or not.

The engine sees addresses, sizes and strides. A tensor of torch may have its elements in another
form, or have none at all; asked for an address, most of them say something all the same. So every
save, stage and load asks here first.
"""

from __future__ import annotations

import torch

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.native.dtypes import DTYPE_NAMES
from torch_ckpt.native.torch_private import (
    AsyncCollectiveTensor,
    is_fake,
    is_wrapper,
    own_word,
    without_functions,
)

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# What may be multiplied by scales.
CODES = frozenset(
    getattr(torch, name)
    for name in (
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("uint8", "int8", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)
_QUANTIZED = frozenset(
    getattr(torch, name)
    for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)  # deprecated by now
)


def memory_of(value: torch.Tensor) -> torch.Tensor | None:
    """A plain strided tensor of the same elements in the same memory; None where there is none.

    Waits for what a collective has still to bring.
    """
    if type(value) not in PLAIN_TENSORS:
        inner = _inner_of(value)
        return inner if inner is None or inner is value else memory_of(inner)
    if (
        value.layout is torch.strided
        and not value.is_nested  # strided as well, by its word
        and value.dtype not in _QUANTIZED
        and (value.is_cpu or not value.is_meta)
    ):
        return value
    return None


def is_writable(value: torch.Tensor) -> bool:
    memory = memory_of(value)
    return memory is not None and memory.dtype in DTYPE_NAMES


def source_of(value: torch.Tensor, name: str) -> torch.Tensor:
    """`memory_of`, of a tensor that is to be saved as `name`. Raises UnsupportedError."""
    memory = memory_of(value)
    if memory is None or memory.dtype not in DTYPE_NAMES:
        raise UnsupportedError(what_is_wrong(value), tensor=name)
    return memory


def keeps_its_own(value: torch.Tensor) -> bool:
    """Whether `value`, of which `memory_of` knows no memory, has elements all the same, which only
    its own `copy_` can set: as tensors of torchao have, and quantized ones."""
    return has_elements(value) and (
        has_own_dispatch(type(value)) or own_word(value, "is_quantized")
    )


def has_elements(value: torch.Tensor) -> bool:
    """Whether there is anything to be copied, as many elements as its shape says."""
    return not (is_shapeless(value) or is_fake(value) or own_word(value, "is_meta"))


def is_shapeless(value: torch.Tensor) -> bool:
    """Whether it has no sizes that a plan could say."""
    return torch.nn.parameter.is_lazy(value) or bool(own_word(value, "is_nested"))


def has_own_dispatch(kind: type) -> bool:
    """Whether tensors of this class say by themselves what an operator does to them."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch.Tensor.__torch_dispatch__


def what_is_wrong(value: torch.Tensor) -> str:
    """Why `memory_of` knows no memory of `value`, or none with a dtype of safetensors."""
    kind = type(value)
    if torch.nn.parameter.is_lazy(value):
        return f"is an {kind.__name__}, which has no shape yet: run the module once before"
    if is_fake(value):
        return "is a fake tensor, which has no data"
    if own_word(value, "is_nested"):
        return "is a nested tensor: give its values and offsets, or a list of its tensors"
    if own_word(value, "is_meta"):
        return "is on the meta device and has no data"
    if has_own_dispatch(kind) and memory_of(value) is None:
        return (
            f"is of class {kind.__module__}.{kind.__qualname__}, a tensor that is made of others: "
            "give those, or a plain tensor of its values"
            + (
                ", or save with torch_ckpt.SavePlanner, flattened and not as a PerRank"
                if is_wrapper(value)
                else ""
            )
        )
    layout = own_word(value, "layout")
    word = layout if layout is not torch.strided else own_word(value, "dtype")
    return f"is {word}; safetensors cannot hold it"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors of one dtype and shape."""
    a, b = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (a, b))
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _inner_of(value: torch.Tensor) -> torch.Tensor | None:
    """What is in the memory of a tensor of some subclass, one layer further in."""
    if torch.nn.parameter.is_lazy(value):
        return None
    if isinstance(value, AsyncCollectiveTensor):
        waited: torch.Tensor = value.wait()
        return waited
    if has_own_dispatch(type(value)):
        return _gathered_by_fsdp(value)
    return without_functions(value)


def _gathered_by_fsdp(value: torch.Tensor) -> torch.Tensor | None:
    """The weight inside of one that FSDP2 casts while it gathers it, as those of torchao's float8
    training: a plain tensor of its dtype, beside which there may be single numbers."""
    if not hasattr(value, "fsdp_pre_all_gather") or not hasattr(value, "__tensor_flatten__"):
        return None
    names, _ = value.__tensor_flatten__()
    first, *others = (getattr(value, name) for name in names)
    same = first.dtype == value.dtype and first.size() == value.size()
    if same and first.stride() == value.stride() and all(each.numel() == 1 for each in others):
        inner: torch.Tensor = first
        return inner
    return None
