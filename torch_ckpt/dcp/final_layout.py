"""Final files: the arguments that ask for them, and what the coordinator says of them: which
tensors they hold, and who writes these."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from torch_ckpt._core import names_text
from torch_ckpt.dcp.reserved import TIES_KEY
from torch_ckpt.dcp.rings import Boxes, node_numbers, plan_rings
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.dtypes import DTYPE_NAMES, PACKED
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.options import check_choice, parse_bytes


def checked_layout(
    layout: str | None,
    max_shard_size: int | str | None,
    policy: DtypePolicy,
    *,
    save_distributed: bool,
    has_mapping: bool,
) -> tuple[bool, int | None]:
    """Whether every rank writes shards, and the bytes of a final file at most, as the arguments of
    a writer say. Raises InvalidArgumentError for those that exclude each other."""
    if layout is not None:
        check_choice("layout", layout, ("sharded", "final"))
        if save_distributed and layout == "final":
            raise InvalidArgumentError(
                "save_distributed=True and layout='final' exclude each other"
            )
        save_distributed = layout == "sharded"
    if policy and save_distributed:
        raise InvalidArgumentError("dtype and keep_fp32 are of final files")
    if max_shard_size is None:
        if layout != "final" or has_mapping:
            return save_distributed, None
        max_shard_size = "5GB"
    if has_mapping or save_distributed:
        raise InvalidArgumentError(
            "max_shard_size is of final files, and without fqn_to_index_mapping"
        )
    return save_distributed, parse_bytes(max_shard_size, "max_shard_size")


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


def final_tensors(plans: list[SavePlan], policy: DtypePolicy) -> dict[str, Any]:
    """The tensors of all plans, in the order of the state dict, in the dtypes that they are stored
    in, and who writes what of them, as columns of a request."""
    tensors: dict[str, Boxes] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                tensors.setdefault(item.index.fqn, []).append((rank, item.tensor_data))
    rings, bands_of = plan_rings(tensors, node_numbers(plans))
    dtypes, shapes, bands = [], [], []
    for fqn, boxes in tensors.items():
        data = boxes[0][1]
        dtype = _dtype_name(data.properties, fqn)
        dtypes.append(policy.stored(fqn, dtype))
        packed = PACKED.get(dtype, 1)
        shapes.append([*data.size[:-1], data.size[-1] * packed] if packed > 1 else [*data.size])
        own = bands_of.get(fqn, [])
        if packed > 1 and len(data.size) == 1:
            own = [(ring, begin * packed, end * packed) for ring, begin, end in own]
        bands.append(own)
    return {
        "names": names_text(list(tensors)),
        "dtypes": dtypes,
        "shapes": shapes,
        "bands": bands,
        "rings": rings,
    }


def _dtype_name(properties: TensorProperties, fqn: str) -> str:
    name = DTYPE_NAMES.get(properties.dtype)
    if name is None:
        raise UnsupportedError(f"is {properties.dtype}; safetensors cannot hold it", tensor=fqn)
    return name
