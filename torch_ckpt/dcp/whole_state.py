"""The state dict of a save on its way through stock's calls: one value, under one key.

Stock's `save` writes to a log, which nobody reads, for each entry of the outermost dict: 18 us each
(2.13), as long as all else that a small tensor takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.items import PLAIN_TENSORS

_KEY = "torch_ckpt.whole"
_NO_STATE = PLAIN_TENSORS | {DTensor}
_METHOD = "set_up_planner"


class _WholeState:
    def __init__(self, state_dict: dict[str, Any], error: BaseException | None) -> None:
        self.state_dict = state_dict
        self.error = error


def whole_state(state_dict: dict[str, Any], error: BaseException | None = None) -> dict[str, Any]:
    """What to give to stock for `state_dict`, whose entries are no Statefuls, with a planner that
    is `Unwrapping`. With `error` the planner raises that instead, where other ranks hear of it."""
    return {_KEY: _WholeState(state_dict, error)}


def without_statefuls(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`, with the states of those entries that have one, as stock takes them."""
    return {
        # Asking a protocol takes longer than staging a small tensor.
        key: value.state_dict()
        if type(value) not in _NO_STATE and isinstance(value, Stateful)
        else value
        for key, value in state_dict.items()
    }


class Unwrapping:
    """That `planner` takes a `whole_state` for the state dict in it, from now until `end`."""

    def __init__(self, planner: SavePlanner) -> None:
        self._attributes: dict[str, Any] | None = planner.__dict__
        self._before = self._attributes.get(_METHOD)
        self._attributes[_METHOD] = _SetUp(planner.set_up_planner)

    def end(self) -> None:
        """Once more is fine."""
        attributes, self._attributes = self._attributes, None
        if attributes is None:
            return
        if self._before is None:
            del attributes[_METHOD]
        else:
            attributes[_METHOD] = self._before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()


class _SetUp:
    """In the place of a planner's set_up_planner. Pickles with the planner."""

    def __init__(self, own: Callable[..., None]) -> None:
        self.__wrapped__ = own  # stock looks at its signature

    def __call__(self, state_dict: dict[str, Any], *arguments: Any, **named: Any) -> None:
        whole: _WholeState = state_dict[_KEY]
        if whole.error is not None:
            raise whole.error
        # A plain dict, as planners get it from stock: of other types ours keeps a record.
        self.__wrapped__(dict(whole.state_dict), *arguments, **named)
