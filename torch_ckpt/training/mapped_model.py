"""The tensors of a model under the names, and in the shapes, that a mapping has them stored in:
views of the model's own memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.planning.boxes import local_boxes, local_part
from torch_ckpt.planning.local_boxes import LocalBoxes
from torch_ckpt.tensor_mapping.mapping import Pairs


class Kind(NamedTuple):
    """What all ranks that have a part of a tensor say of the whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Kinds = dict[str, Kind]


def kinds_of(state: Mapping[str, Any]) -> Kinds:
    """Of the tensors of a model's state, by name."""
    return {
        name: Kind(tuple(value.shape), value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def merged(of_ranks: Sequence[Kinds]) -> Kinds:
    """Of all parts of a model, which ranks may have each for themselves. Raises
    InvalidArgumentError where two say other things of one."""
    found: Kinds = {}
    for rank, own in enumerate(of_ranks):
        for name, kind in own.items():
            if found.setdefault(name, kind) != kind:
                raise InvalidArgumentError(
                    f"is {kind.dtype} of shape {kind.shape}, and {found[name].dtype} of shape "
                    f"{found[name].shape} on another rank",
                    tensor=name,
                    rank=rank,
                )
    return found


def as_stored(
    state: Mapping[str, Any], kinds: Kinds, pairs: Pairs, numbers: Mapping[str, int]
) -> dict[str, Any]:
    """`state`, where in place of each tensor that pairs name there are the stored ones that have
    its elements: LocalBoxes, on every rank all of them.

    kinds: of the tensors of all ranks. Raises InvalidArgumentError, naming pair and tensor, for
    what is no mapping of these: csrc/plan/tensor_map.h.
    """
    names = list(kinds)
    held: list[torch.Tensor] = []
    boxes: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        for offsets, part in _parts(state.get(name), name):
            held.append(part)
            boxes.append(
                {
                    "native": number,
                    "offsets": list(offsets),
                    "sizes": list(part.shape),
                    "strides": list(part.stride()),
                }
            )
    request = {
        "op": "map_memory",
        "pairs": list(pairs.pairs),
        "names": core.names_text(names),
        "shapes": [kind.shape for kind in kinds.values()],
        "numbers": dict(numbers),
        "boxes": boxes,
    }
    answer = core.call(request)
    pairs.check_matched(answer["unmatched"])
    mapped = set(answer["natives"])
    out = {name: value for name, value in state.items() if name not in mapped}
    for name, shape, native, parts in answer["stored"]:
        if name in out or (name in kinds and name not in mapped):
            raise InvalidArgumentError(
                "is a stored tensor of tensor_mapping, and one of the model's that no pair names",
                tensor=name,
            )
        if 0 in shape:  # no rank has a box of it, and it is stored all the same
            out[name] = torch.empty(shape, dtype=kinds[names[native]].dtype, device="cpu")
            continue
        out[name] = LocalBoxes(
            shape,
            [
                (offsets, _view(held[number], first, sizes, strides))
                for number, first, offsets, sizes, strides in parts
            ],
            kinds[names[native]].dtype,
        )
    return out


def _parts(value: Any, name: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """What this rank has of a tensor: where it stands in the whole, and where it is."""
    if isinstance(value, DTensor):
        for box in local_boxes(value, name):
            yield tuple(box.offsets), local_part(value, box)
    elif isinstance(value, torch.Tensor):
        yield (0,) * value.dim(), value.detach()


def _view(part: torch.Tensor, first: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    return part.as_strided(sizes, strides, part.storage_offset() + first)
