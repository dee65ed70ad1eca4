"""Trees of dicts and lists: taken apart, compared, put together."""

from torch_ckpt.megatron.trees import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    map_reduce,
    merge,
    nested_values,
)

__all__ = [
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "diff",
    "extract_matching_values",
    "map_reduce",
    "merge",
    "nested_values",
]
