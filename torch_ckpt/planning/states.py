"""The entries of a state dict that have a state of their own, as modules and optimizers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.planning.local_boxes import LocalBoxes


class HasState(Protocol):
    """What modules, optimizers and stock's Stateful have in common."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


# Asking a protocol takes longer than staging a small tensor.
_NO_STATE = PLAIN_TENSORS | {
    *(DTensor, LocalBoxes, type(None), bool, int, float, str, bytes, list, tuple, dict)
}


def has_state(value: Any) -> bool:
    """Whether it is a Stateful of DCP's."""
    return type(value) not in _NO_STATE and isinstance(value, Stateful)


def states_of(state_dict: Any) -> dict[str, Any]:
    """A plain dict of the entries of `state_dict`, or of the state that it has itself, with the
    states of those that have one. These are asked in the order of their names: what they do may be
    a collective. Raises InvalidArgumentError for what is neither."""
    if not isinstance(state_dict, Mapping) and has_state(state_dict):
        state_dict = state_dict.state_dict()
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(
            f"a state is a dict of names, or has a state_dict() that returns one; this is a "
            f"{type(state_dict).__name__}: give it a name, {{'name': ...}}"
        )
    states = dict(state_dict)
    for key in sorted((key for key, value in states.items() if has_state(value)), key=str):
        states[key] = states[key].state_dict()
    return states
