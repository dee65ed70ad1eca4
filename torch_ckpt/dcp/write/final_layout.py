"""Final files: what the coordinator says of them: which tensors they hold, and who writes these."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from torch_ckpt.dcp.plan.rings import Band, Boxes, node_numbers, note_of, plan_rings
from torch_ckpt.dcp.write.layouts import Layouts
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.native.core import names_text
from torch_ckpt.native.dtypes import DTYPE_NAMES, PACKED
from torch_ckpt.planning.reserved import TIES_KEY


def check_mapped(plan: SavePlan, mapping: Mapping[str, int] | None, rank: int | None) -> None:
    """Raise InvalidArgumentError for a tensor of the plan that `mapping` lacks."""
    if mapping is None:
        return
    # Of what is tied one name is enough.
    tied = (plan.planner_data or {}).get(TIES_KEY, ())
    for item in plan.items:
        fqn = item.index.fqn
        if item.type is not WriteItemType.BYTE_IO and fqn not in mapping and fqn not in tied:
            raise InvalidArgumentError("is not in fqn_to_index_mapping", tensor=fqn, rank=rank)


def check_planned(planned: Collection[str], mapping: Mapping[str, int] | None) -> None:
    """Raise InvalidArgumentError for a name of `mapping` that is not planned."""
    for fqn in mapping or ():
        if fqn not in planned:
            raise InvalidArgumentError(
                "is in fqn_to_index_mapping but not in the state dict; strict=False would "
                "ignore it",
                tensor=fqn,
            )


def check_castable(plans: list[SavePlan], policy: DtypePolicy) -> None:
    """Raise InvalidArgumentError for a tensor of the plans that `policy` names a dtype for which it
    is not cast to."""
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                fqn = item.index.fqn
                policy.stored(fqn, _dtype_name(item.tensor_data.properties, fqn))


def final_tensors(plans: list[SavePlan], layouts: Layouts) -> dict[str, Any]:
    """The tensors of all plans that go to final files, in the order of the state dict, in the
    dtypes that they are stored in, and who writes what of them, as fields of a request: their
    names; "kinds", each a dtype, shape and bands that tensors have in common; which of these each
    has; and the rings."""
    policy = layouts.main.dtype_policy
    planned: dict[str, Boxes] = {}
    for rank, plan in enumerate(plans):
        for fqn, data in layouts.in_final_files(plan):
            planned.setdefault(fqn, []).append((rank, data))
    # Who writes a replica goes by load, not by order.
    ordered = dict.fromkeys(itertools.chain(*(note_of(plan).fqns for plan in plans), planned))
    tensors = {fqn: planned[fqn] for fqn in ordered if fqn in planned}
    for plan in plans if policy else ():
        for alias, fqn in ((plan.planner_data or {}).get(TIES_KEY) or {}).items():
            if alias not in tensors and fqn in tensors:
                properties = tensors[fqn][0][1].properties
                policy.check_tied(alias, fqn, _dtype_name(properties, fqn))
    rings, bands = plan_rings(tensors, node_numbers(plans))
    kinds: list[tuple[str, list[int], list[Band]]] = []
    # Numbers of kinds, by what tensors share. Not by their descriptions: stock's planner makes one
    # for each tensor.
    numbers: dict[tuple[tuple[int, ...], str, str, int], int] = {}
    kind_of = []
    no_bands: list[Band] = []
    casts = bool(policy)
    for fqn, boxes in tensors.items():
        data = boxes[0][1]
        dtype = _dtype_name(data.properties, fqn)
        stored = policy.stored(fqn, dtype) if casts else dtype
        of_tensor = bands.get(fqn, no_bands)
        number = numbers.setdefault((tuple(data.size), dtype, stored, id(of_tensor)), len(kinds))
        if number == len(kinds):
            packed = PACKED.get(dtype, 1)
            if packed > 1 and not data.size:
                raise UnsupportedError("packed elements need a dimension", tensor=fqn)
            kinds.append((stored, *_in_elements(data.size, packed, of_tensor)))
        kind_of.append(number)
    return {
        "names": names_text(list(tensors)),
        "kinds": kinds,
        "kind_of": kind_of,
        "rings": rings,
    }


def _in_elements(size: torch.Size, packed: int, bands: list[Band]) -> tuple[list[int], list[Band]]:
    """Shape and bands of a tensor whose elements hold `packed` of safetensors' each."""
    if packed == 1:
        return [*size], bands
    if len(size) == 1:
        bands = [(ring, begin * packed, end * packed) for ring, begin, end in bands]
    return [*size[:-1], size[-1] * packed], bands


def _dtype_name(properties: TensorProperties, fqn: str) -> str:
    name = DTYPE_NAMES.get(properties.dtype)
    if name is None:
        raise UnsupportedError(f"is {properties.dtype}; safetensors cannot hold it", tensor=fqn)
    return name
