"""Final files: the arguments that ask for them, and what the coordinator says of them: which
tensors they hold, and which of these it is to gather itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType

from torch_ckpt._core import names_text
from torch_ckpt.dcp.reserved import TIES_KEY
from torch_ckpt.dcp.rings import Band, Rows, rings_of
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.dtypes import DTYPE_NAMES, PACKED
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.options import check_choice, parse_bytes

# Bytes in a row, in the file, below which a rank does not write a box by itself: the blocks that it
# shares with other ranks, one at each end of a row, must be few beside the row.
MIN_ROW_BYTES = 64 * 1024


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
    in, as columns of a request."""
    tensors: dict[str, TensorWriteData] = {}
    shorts: dict[str, int] = {}  # tensors with boxes in rows that are short, and how many a box
    rows_of: dict[int, int] = {}  # by description: boxes that are alike share one
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            fqn = item.index.fqn
            tensors.setdefault(fqn, data)
            rows = rows_of.get(id(data))
            if rows is None:
                rows = rows_of[id(data)] = _short_rows(data)
            if rows > shorts.get(fqn, 0):
                shorts[fqn] = rows
    _drop_small_stretches(tensors, shorts)
    parts: dict[str, list[Rows]] = {fqn: [] for fqn in shorts}
    for rank, plan in enumerate(plans) if shorts else ():
        for item in plan.items:
            if item.index.fqn in shorts and item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                begin = chunk.offsets[0]
                parts[item.index.fqn].append(Rows(rank, begin, begin + chunk.sizes[0]))
    rings, bands_of = rings_of(parts, [plan.storage_data for plan in plans])
    dtypes, shapes, bands = [], [], []
    for fqn, data in tensors.items():
        dtype = _dtype_name(data.properties, fqn)
        dtypes.append(policy.stored(fqn, dtype))
        packed = PACKED.get(dtype, 1)
        shapes.append([*data.size[:-1], data.size[-1] * packed] if packed > 1 else [*data.size])
        own = bands_of.get(fqn, [])
        if own and shorts[fqn] == 1:
            own = [band for band in own if _is_worth_a_ring(band, data)]
        if len(data.size) == 1:
            own = [(ring, begin * packed, end * packed) for ring, begin, end in own]
        bands.append(own)
    return {
        "names": names_text(list(tensors)),
        "dtypes": dtypes,
        "shapes": shapes,
        "bands": bands,
        "rings": rings,
    }


def _is_worth_a_ring(band: Band, data: TensorWriteData) -> bool:
    """Of boxes of one row each, which can be written one by one as well."""
    ring, begin, end = band
    if ring < 0 or end - begin == data.size[0]:
        return ring >= 0
    row = math.prod(data.size[1:]) * data.properties.dtype.itemsize
    return (end - begin) * row >= MIN_ROW_BYTES


def _drop_small_stretches(tensors: Mapping[str, TensorWriteData], shorts: dict[str, int]) -> None:
    """Take from `shorts` the boxes of one row that a ring could not make longer: those of tensors
    with too few bytes, together with their neighbours in `shorts`."""
    stretch: list[str] = []
    size = 0
    for fqn, data in [*tensors.items(), (None, None)]:
        if fqn is not None and data is not None and fqn in shorts:
            stretch.append(fqn)
            size += math.prod(data.size) * data.properties.dtype.itemsize
            continue
        if size < MIN_ROW_BYTES:
            for short in stretch:
                if shorts[short] == 1:
                    del shorts[short]
        stretch, size = [], 0


def _dtype_name(properties: TensorProperties, fqn: str) -> str:
    name = DTYPE_NAMES.get(properties.dtype)
    if name is None:
        raise UnsupportedError(f"is {properties.dtype}; safetensors cannot hold it", tensor=fqn)
    return name


def _short_rows(data: TensorWriteData) -> int:
    """In how many rows the box lies in its tensor, if these are too short to be written one by
    one; else 0."""
    row = data.properties.dtype.itemsize
    sizes = data.chunk.sizes
    for dim in reversed(range(len(sizes))):
        row *= sizes[dim]
        if sizes[dim] != data.size[dim]:
            return math.prod(sizes[:dim]) if row < MIN_ROW_BYTES else 0
    return 0
