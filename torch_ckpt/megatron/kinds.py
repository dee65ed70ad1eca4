"""What a leaf of a state dict of Megatron's is: classes, ours and Megatron's, are known by name."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any


class Kind(Enum):
    TENSOR = "ShardedTensor"
    OBJECT = "ShardedObject"
    FACTORY = "ShardedTensorFactory"
    NONPERSISTENT = "LocalNonpersistentObject"
    VALUE = ""  # everything else: common state


_MODULES = ("torch_ckpt.megatron.leaves", "megatron.core.dist_checkpointing.mapping")
_KINDS = {(module, kind.value): kind for module in _MODULES for kind in Kind if kind.value}
_known: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()


def kind_of(leaf: Any) -> Kind:
    """What `leaf` is: one of ours or of Megatron's classes, or of one below them, or a value."""
    cls = type(leaf)
    kind = _known.get(cls)
    if kind is None:
        named = (_KINDS.get((base.__module__, base.__qualname__)) for base in cls.__mro__)
        kind = _known[cls] = next((each for each in named if each is not None), Kind.VALUE)
    return kind
