"""Tied tensors: several names of one memory, which a final checkpoint stores once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.plan.items import WriteItems
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.native.torch_private import local_tensor
from torch_ckpt.planning.reserved import TIES_KEY

Ties = dict[str, str]  # an alias, and the name that its tensor is stored under


class FinalNames(NamedTuple):
    """Which names of a save stand in final files.

    mapped: names that are stored there in any case, whatever they are tied to.
    beside: what is not there, but in shards: names that have one of these before their first dot.
    """

    mapped: frozenset[str]
    beside: frozenset[str]

    def ties(self, state_dict: Mapping[str, Any]) -> Ties:
        """`find_ties` of what stands there."""
        if self.beside:
            state_dict = {
                fqn: value
                for fqn, value in state_dict.items()
                if fqn.partition(".")[0] not in self.beside
            }
        return find_ties(state_dict, self.mapped)


def find_ties(state_dict: Mapping[str, Any], stored: Collection[str]) -> Ties:
    """The names of a flat state dict that are another one's memory, whole, as this rank sees it.

    The first name is the one to store; names in `stored` are stored in any case, and before others.
    """
    at: dict[int, list[str]] = {}
    for fqn, value in state_dict.items():
        address = _address(value)
        if address:
            at.setdefault(address, []).append(fqn)
    ties = {}
    for fqns in at.values():
        if len(fqns) == 1:
            continue
        first: dict[Any, str] = {}
        keys = [_what(state_dict[fqn]) for fqn in fqns]
        for fqn, key in zip(fqns, keys, strict=True):
            known = first.setdefault(key, fqn)
            if fqn in stored and known not in stored:
                first[key] = fqn
        for fqn, key in zip(fqns, keys, strict=True):
            if first[key] != fqn and fqn not in stored:
                ties[fqn] = first[key]
    return ties


def identity(value: Any) -> tuple[Any, ...]:
    """The same for two names of one memory, whole, and for nothing else."""
    address = _address(value)
    return (address, *_what(value)) if address else (id(value),)


def _address(value: Any) -> int:
    """Where the bytes of a tensor begin; 0 for what is no tensor, or has no bytes."""
    if isinstance(value, DTensor):
        value = local_tensor(value)
    if type(value) not in PLAIN_TENSORS or value.layout is not torch.strided:
        return 0
    # Without elements there may be an address all the same.
    return value.data_ptr() if value.numel() else 0


def _what(value: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors at one address have in common if they are one."""
    where: tuple[Any, ...] = ()
    if isinstance(value, DTensor):
        where = (value.shape, tuple(value.placements), value.device_mesh)
        value = local_tensor(value)
    turned = (value.is_conj(), value.is_neg())
    return (value.device, value.dtype, value.size(), value.stride(), turned, where)


def drop_aliases(plans: list[SavePlan]) -> tuple[list[SavePlan], Ties]:
    """`plans` without the items of aliases: names that every rank which has a part of them calls
    an alias of one and the same other name."""
    ties_of = [(plan.planner_data or {}).get(TIES_KEY) or {} for plan in plans]
    candidates = {alias: name for ties in ties_of for alias, name in ties.items()}
    if not candidates:
        return plans, {}
    for plan, ties in zip(plans, ties_of, strict=True):
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in candidates and ties.get(fqn) != candidates[fqn]:
                del candidates[fqn]
    left = [
        dataclasses.replace(
            plan, items=WriteItems(item for item in plan.items if item.index.fqn not in candidates)
        )
        for plan in plans
    ]
    return left, candidates
