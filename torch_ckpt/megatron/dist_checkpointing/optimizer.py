"""The states of optimizers, sharded as the parameters that they belong to."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.kinds import Kind, kind_of
from torch_ckpt.megatron.leaves import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from torch_ckpt.megatron.trees import nested_values

logger = logging.getLogger(__name__)

Entry = ShardedTensor | ShardedTensorFactory


def get_optim_param_to_id_map(
    optim_params_iter: Iterable[torch.nn.Parameter],
) -> dict[int, int]:
    """id(parameter) to its number among those of the optimizer; the first one counts."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Entry]:
    """Each parameter's entry in the model's state, by its number in the optimizer: the one whose
    data it is."""
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, Entry] = {}
    for entry in nested_values(model_sharded_state_dict):
        if kind_of(entry) in (Kind.TENSOR, Kind.FACTORY) and id(entry.data) in numbers:
            found[numbers[id(entry.data)]] = entry
    if not found:
        logger.warning(
            "no entry of the model's state has a parameter of the optimizer for its data: take the "
            "state with keep_vars=True"
        )
    return found


def make_sharded_optimizer_tensor(model_param: Any, optim_param: torch.Tensor, prefix: str) -> Any:
    """An entry for a state of the optimizer, cut as that of its parameter, with `prefix` before its
    key. Raises CheckpointingException where their shapes differ."""
    optim_param = _local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if kind_of(model_param) is Kind.FACTORY:
        return dataclasses.replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != tuple(model_param.local_shape):
        raise CheckpointingException(
            f"this state of the optimizer has shape {list(optim_param.shape)}, and its parameter "
            f"{list(model_param.local_shape)}",
            tensor=key,
        )
    return dataclasses.replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, Entry],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Put entries in the places of the tensors of an optimizer's state dict, which is changed, with
    keys `optimizer.state.<kind>.<key of the parameter>`; kinds of `exclude_keys` go. The `params`
    of its groups are values that are not stored. Raises ValueError for a number that no parameter
    has."""
    states: dict[int, dict[str, Any]] = {}
    for number, state in optim_state_dict["state"].items():
        states[number] = {}
        for kind, value in state.items():
            if kind in exclude_keys:
                continue
            if number not in id_to_sharded_param_map:
                raise ValueError(f"no parameter of the model has the number {number}")
            states[number][kind] = make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], value, f"optimizer.state.{kind}"
            )
    optim_state_dict["state"] = states
    optim_state_dict["param_groups"] = copy.deepcopy(optim_state_dict["param_groups"])
    for group in optim_state_dict["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
