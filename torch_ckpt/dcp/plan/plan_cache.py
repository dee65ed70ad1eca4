"""enable_plan_caching: plans that are as they were are not sent again.

A rank whose plan is that of its last finished save says so, with the token of the global plan that
its final plan belongs to. The coordinator takes its word only where it remembers that very global
plan: stock goes by the planner's class alone, so that a save which failed, or one of other ranks,
lets ranks write by final plans that do not fit each other, and tensors get lost.

All of it lives as long as the process and is kept by `Key`. What a save begins with is handed on to
its end: of two at the same time none takes the other's plans.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt.errors import ConflictError, InternalError
from torch_ckpt.planning.reserved import PLAN_TOKEN

Key = tuple[Any, ...]


@dataclasses.dataclass(slots=True)
class RankPlans:
    """What a rank remembers of its last save that got through planning."""

    token: str
    local: SavePlan
    final: SavePlan


@dataclasses.dataclass(slots=True)
class GlobalPlans:
    """What the coordinator remembers of the last global plan: of every rank the local plan and the
    final one."""

    token: str
    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata


_ranks: dict[Key, RankPlans] = {}
_global: dict[Key, GlobalPlans] = {}
# Saves that have begun and have not got through planning. Where one failed there, on whichever
# rank, no rank has taken its final plan, and the next save begins anew.
_unfinished: set[Key] = set()


def begin(key: Key) -> RankPlans | None:
    """This rank's plans of the last save; call once a save."""
    if key in _unfinished:
        _ranks.pop(key, None)
    _unfinished.add(key)
    return _ranks.get(key)


def unchanged(token: str) -> SavePlan:
    """What stands for a plan, local or final, that is as it was."""
    return SavePlan([], planner_data={PLAN_TOKEN: token}, usable=False)


def whole_plans(key: Key, plans: list[SavePlan]) -> tuple[list[SavePlan], GlobalPlans | None, bool]:
    """Fill in the local plans that have not been sent.

    Returns every rank's plan, what is known of the last save, and whether nothing has changed.
    Raises ConflictError for a rank whose plan is not known here; its next one comes whole.
    """
    known = _global.get(key)
    whole = []
    for rank, plan in enumerate(plans):
        if plan.usable:
            whole.append(plan)
            continue
        token = (plan.planner_data or {}).get(PLAN_TOKEN)
        if known is None or known.token != token or len(known.local) != len(plans):
            raise ConflictError(
                "its plan was cached by a save of other ranks or another coordinator; the next "
                "save plans anew. With enable_plan_caching, save through other process groups by "
                "torch_ckpt.save",
                rank=rank,
            )
        whole.append(known.local[rank])
    return whole, known, not any(plan.usable for plan in plans)


def remember(
    key: Key,
    sent: list[SavePlan],
    local: list[SavePlan],
    final: list[SavePlan],
    metadata: Metadata,
    known: GlobalPlans | None,
) -> list[SavePlan]:
    """Keep a new global plan; returns what to send to each rank. `sent` is what came from it, and
    `known` what `whole_plans` has filled in from."""
    token = secrets.token_hex(8)
    marked = [dataclasses.replace(plan, planner_data={PLAN_TOKEN: token}) for plan in final]
    _global[key] = GlobalPlans(token, local, marked, metadata)
    return [
        unchanged(token)
        if not was.usable and known is not None and _same_items(known.final[rank], plan)
        else plan
        for rank, (was, plan) in enumerate(zip(sent, marked, strict=True))
    ]


def final_plans(plans: list[SavePlan]) -> list[SavePlan] | None:
    """Every rank's final plan, of what the coordinator sends to the ranks; None where it stands for
    one that is not known here (stock's planner caches plans too)."""
    whole = []
    for rank, plan in enumerate(plans):
        if not plan.usable:
            token = (plan.planner_data or {}).get(PLAN_TOKEN)
            known = next((each for each in _global.values() if each.token == token), None)
            if token is None or known is None:
                return None
            plan = known.final[rank]
        whole.append(plan)
    return whole


def finish(key: Key, local: SavePlan, received: SavePlan, last: RankPlans | None) -> SavePlan:
    """This rank's final plan, of which `received` is what the coordinator has sent; `last` is what
    `begin` gave for this save."""
    _unfinished.discard(key)
    token = (received.planner_data or {}).get(PLAN_TOKEN)
    if token is None:  # of a save by one rank, which needs no cache
        return received
    if received.usable:
        final = received
    elif last is not None:
        final = last.final
    else:
        raise InternalError("was told to write by a plan that it does not have")
    _ranks[key] = RankPlans(token, local, final)
    return final


def _same_items(plan: SavePlan, other: SavePlan) -> bool:
    return bool(plan.items == other.items)
