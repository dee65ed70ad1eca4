"""Tensors under the names, and in the shapes, that a mapping has them stored in: views of their own
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.native.opened import PartlyUsed
from torch_ckpt.planning.boxes import local_boxes, local_part
from torch_ckpt.planning.local_boxes import LocalBoxes
from torch_ckpt.planning.per_rank import is_rank_part
from torch_ckpt.tensor_mapping.mapping import Pairs


class Kind(NamedTuple):
    """What all ranks that have a part of a tensor say of the whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Kinds = dict[str, Kind]


def kinds_of(state: Mapping[str, Any]) -> Kinds:
    """Of the tensors of a flat state, by name; what is each rank's own is none of them."""
    return {
        name: Kind(tuple(value.shape), value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_rank_part(name.rpartition(".")[2])
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


class MappedState(NamedTuple):
    """values: the state, where in place of each tensor that pairs name there are the stored ones
        that have its elements: LocalBoxes, on every rank all of them.
    zeros: views of what nothing is stored for.
    partly, unmatched: as those of native/opened.py's Mapped.
    """

    values: dict[str, Any]
    zeros: list[torch.Tensor]
    partly: list[PartlyUsed]
    unmatched: frozenset[int]


def map_state(
    state: Mapping[str, Any],
    kinds: Kinds,
    pairs: Pairs,
    numbers: Mapping[str, int],
    stored: Mapping[str, Sequence[int]] | None = None,
) -> MappedState:
    """`state`, flat, as it is stored.

    kinds: of the tensors of all ranks. stored: the shapes of the tensors that there are, by name;
    None where they are to be made, and get the smallest that have all elements. Raises
    InvalidArgumentError, naming pair and tensor, for what is no mapping of these:
    csrc/plan/tensor_map.h.
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
    if stored is not None:
        request["stored_names"] = core.names_text(list(stored))
        request["stored_shapes"] = list(stored.values())
    answer = core.call(request)
    mapped = {names[at] for at in answer["mapped"]}
    out = {name: value for name, value in state.items() if name not in mapped}
    shapes = [torch.Size(shape) for shape in answer["shapes"]]
    numbers_of_boxes = iter(answer["boxes"])
    columns = (answer[column] for column in ("shape_of", "natives", "counts"))
    for name, at, native, count in zip(core.listed_names(answer["names"]), *columns, strict=True):
        if name in out or (name in kinds and name not in mapped):
            raise InvalidArgumentError(
                "is a stored tensor of tensor_mapping, and one that no pair names",
                tensor=name,
            )
        shape, dtype = shapes[at], kinds[names[native]].dtype
        if 0 in shape:  # no rank has a box of it, and it is stored all the same
            out[name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        views = [_view(held, numbers_of_boxes, len(shape)) for _ in range(count)]
        out[name] = LocalBoxes(shape, views, dtype)
    left = answer["zeros"]
    zeros: list[torch.Tensor] = []
    while left:
        dims = held[left[0]].dim()
        zeros.append(_view(held, iter(left), dims)[1])
        left = left[2 + 3 * dims :]
    partly = [PartlyUsed(*each) for each in answer["partly"]]
    return MappedState(out, zeros, partly, frozenset(answer["unmatched"]))


def _parts(value: Any, name: str) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """What this rank has of a tensor: where it stands in the whole, and where it is. Nothing of
    one that is not made of strides."""
    if isinstance(value, LocalBoxes):
        yield from value.boxes
    elif isinstance(value, DTensor):
        for box in local_boxes(value, name):
            yield box.offsets, local_part(value, box)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        yield (0,) * value.dim(), value.detach()


def _view(
    held: Sequence[torch.Tensor], numbers: Iterator[int], dims: int
) -> tuple[tuple[int, ...], torch.Tensor]:
    """The next box, as map_memory says it: where it stands in its tensor, and where it is."""
    part, first = held[next(numbers)], next(numbers)
    offsets, sizes, strides = (tuple(islice(numbers, dims)) for _ in range(3))
    return offsets, part.as_strided(sizes, strides, part.storage_offset() + first)
