"""The state of optimizers by the names of parameters, so that parts and worlds may change.

    optimizer.state.<fqn>.<key>        what the optimizer keeps of a parameter, in its own dtype
    optimizer.groups.<id>.<key>        hyperparameters, and `params`, the names that they are of

The id is made of these names: ranks with the same group say the same, and those of a pipeline each
their own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from torch_ckpt.planning.wrappers import is_made_of_others

_PARAMS = "params"
_NAMES = frozenset((_PARAMS, "param_names"))  # of a group, that follow from the model


class OptimizerState:
    """The state of one optimizer, or of several that share out a model's parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = (
            list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]  # type: ignore[list-item]
        )
        for each in self.optimizers:
            if not hasattr(each, "param_groups") or not hasattr(each, "state"):
                raise InvalidArgumentError(
                    f"optimizer: a {type(each).__name__} is no torch.optim.Optimizer"
                )

    def held(self, names: Mapping[nn.Parameter, str]) -> dict[str, _Held]:
        """By name, each parameter that an optimizer has."""
        held: dict[str, _Held] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group[_PARAMS]:
                    name = names.get(parameter)
                    if name is None:
                        raise InvalidArgumentError(
                            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                            "the model does not have"
                        )
                    if name in held:
                        raise InvalidArgumentError("is in two groups of optimizers", tensor=name)
                    held[name] = _Held(optimizer, group, parameter)
        return held

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """What is saved of it. `names`: of the model's parameters."""
        held = self.held(names)
        states: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for key in optimizer.state:
                if not isinstance(key, torch.Tensor):
                    raise UnsupportedError(
                        f"the optimizer's state has an entry {key!r} that is of no parameter"
                    )
            for group in optimizer.param_groups:
                of_group = [names[parameter] for parameter in group[_PARAMS]]
                if of_group:
                    own = {key: value for key, value in group.items() if key not in _NAMES}
                    groups[group_id(of_group)] = {**own, _PARAMS: of_group}
        for name, (optimizer, _, parameter) in held.items():
            state = optimizer.state.get(parameter)
            if not state:
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and is_made_of_others(value):
                    raise UnsupportedError(
                        f"the optimizer keeps a {type(value).__name__} of it ({key}), which comes "
                        "back into one alone: load such a state by torch_ckpt.load",
                        tensor=name,
                    )
            states[name] = dict(state)
        return {"state": states, "groups": groups}

    def ids(self, names: Mapping[nn.Parameter, str]) -> dict[int, str]:
        """By the `id` of each optimizer a name for it, made of those of all its parameters."""
        return {
            id(optimizer): group_id(
                [names[each] for group in optimizer.param_groups for each in group[_PARAMS]]
            )
            for optimizer in self.optimizers
        }

    def target(
        self, held: _Held, keys: tuple[str | int, ...], dtype: torch.dtype, shape: torch.Size
    ) -> torch.Tensor:
        """Where the tensor at `keys` in the state of a parameter is loaded: into what the optimizer
        has, if that is alike, else into new memory, with the placements of the parameter where it
        has its shape."""
        optimizer, group, parameter = held
        if len(keys) == 1:
            live = optimizer.state.get(parameter, {}).get(keys[0])
            if isinstance(live, torch.Tensor) and (live.dtype, live.shape) == (dtype, shape):
                return live
        # As Optimizer.load_state_dict has it: counts stay on the host unless a kernel reads them.
        if keys == ("step",) and not (group.get("capturable") or group.get("fused")):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if keys != ("step",) and shape == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(shape, dtype=dtype, device=_device_of(parameter))

    def take(self, names: Mapping[nn.Parameter, str], loaded: Mapping[str, Any]) -> None:
        """Make `loaded`, as `state_dict` gave it on any ranks, the state. Raises IncompleteError
        for a parameter that no group has, InvalidArgumentError for a group whose parameters had
        different hyperparameters."""
        held = self.held(names)
        groups: dict[str, Mapping[str, Any]] = {}
        for group in loaded.get("groups", {}).values():
            groups.update(dict.fromkeys(group[_PARAMS], group))
        by_group: dict[int, tuple[dict[str, Any], str, Mapping[str, Any]]] = {}
        for name, (_, live, _) in held.items():
            saved = groups.get(name)
            if saved is None:
                raise IncompleteError("no saved optimizer has this parameter", tensor=name)
            _, first, other = by_group.setdefault(id(live), (live, name, saved))
            for key in (saved.keys() | other.keys()) - _NAMES:
                if key not in saved or key not in other or not _same(saved[key], other[key]):
                    raise InvalidArgumentError(
                        f"is in one group with {first}, and they were saved with different {key}",
                        tensor=name,
                    )
        for live, _, saved in by_group.values():
            for key in saved.keys() - _NAMES:
                value = copy.deepcopy(saved[key])  # of one group there may be several now
                if isinstance(live.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    live[key].copy_(value)
                else:
                    live[key] = value
        states = loaded.get("state", {})
        for name, (optimizer, _, parameter) in held.items():
            if name in states:
                optimizer.state[parameter] = dict(states[name])
            else:
                optimizer.state.pop(parameter, None)


class _Held(NamedTuple):
    """Who has a parameter."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: nn.Parameter


def group_id(names: Sequence[str]) -> str:
    """What is the same for the same names, in the same order, and for no others."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def _device_of(parameter: torch.Tensor) -> torch.device:
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
