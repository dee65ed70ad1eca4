"""The entries of a state dict that have a state of their own, as modules and optimizers do."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.plan.items import PLAIN_TENSORS

_NO_STATE = PLAIN_TENSORS | {DTensor}


def has_state(value: Any) -> bool:
    # Asking a protocol takes longer than staging a small tensor.
    return type(value) not in _NO_STATE and isinstance(value, Stateful)


def states_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A plain dict of the entries of `state_dict`, with the states of those that have one. These
    are asked in the order of their names: what they do may be a collective."""
    states = dict(state_dict)
    for key in sorted((key for key, value in states.items() if has_state(value)), key=str):
        states[key] = states[key].state_dict()
    return states
