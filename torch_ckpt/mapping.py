"""fqn_to_index_mapping: which final file each tensor goes to."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch_ckpt.errors import InvalidArgumentError

MAX_INDEX = 99_999  # five digits, as everybody's file names have


def checked_mapping(mapping: Mapping[str, Any] | None) -> dict[str, int] | None:
    """`mapping` with plain integers. Raises InvalidArgumentError, naming the tensor, for an index
    that is no integer from 1 to MAX_INDEX."""
    if mapping is None:
        return None
    checked = {}
    for fqn, index in mapping.items():
        try:
            number = operator.index(index)
        except TypeError:
            number = 0
        if isinstance(index, bool) or not 1 <= number <= MAX_INDEX:
            raise InvalidArgumentError(
                f"has index {index!r} in fqn_to_index_mapping; they are integers from 1 to "
                f"{MAX_INDEX}",
                tensor=str(fqn),
            )
        checked[fqn] = number
    return checked
