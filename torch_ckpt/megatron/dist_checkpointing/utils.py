"""Trees with leaves of Megatron's taken apart by kind, and their keys given other prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_ckpt.megatron.kinds import Kind, kind_of
from torch_ckpt.megatron.leaves import ShardedStateDict, StateDict
from torch_ckpt.megatron.trees import dict_list_map_inplace, extract_matching_values

_WITH_KEY = (Kind.TENSOR, Kind.OBJECT, Kind.FACTORY)


def extract_sharded_tensors(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """The ShardedTensors, and the rest, as `extract_matching_values` gives them."""
    return _of_kinds(sharded_state_dict, Kind.TENSOR)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """The ShardedTensors and factories, and the rest."""
    return _of_kinds(sharded_state_dict, Kind.TENSOR, Kind.FACTORY)


def extract_sharded_base(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """All that has a key, and the rest."""
    return _of_kinds(sharded_state_dict, *_WITH_KEY)


def extract_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """The LocalNonpersistentObjects, and the rest."""
    return _of_kinds(sharded_state_dict, Kind.NONPERSISTENT)


def _of_kinds(state_dict: ShardedStateDict, *kinds: Kind) -> tuple[Any, Any]:
    return extract_matching_values(state_dict, lambda leaf: kind_of(leaf) in kinds)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put `prefix` before every key."""
    _rename(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Put `new_prefix` in the place of `old_prefix` in every key. Raises ValueError, which names
    it, for a key that begins otherwise; nothing is renamed then."""
    keys: list[str] = []
    _rename(sharded_state_dict, lambda key: keys.append(key) or key)  # type: ignore[func-returns-value]
    for key in keys:
        if not key.startswith(old_prefix):
            raise ValueError(f"{key} does not begin with {old_prefix}")
    _rename(sharded_state_dict, lambda key: f"{new_prefix}{key.removeprefix(old_prefix)}")


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]
) -> None:
    """Replace prefixes of keys as `prefix_map` says; of several that fit, the first."""

    def renamed(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return f"{new}{key.removeprefix(old)}"
        return key

    _rename(sharded_state_dict, renamed)


def _rename(state_dict: ShardedStateDict, renamed: Callable[[str], str]) -> None:
    def put(leaf: Any) -> Any:
        if kind_of(leaf) in _WITH_KEY:
            leaf.key = renamed(leaf.key)
        return leaf

    dict_list_map_inplace(put, state_dict)
