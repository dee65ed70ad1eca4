"""Tensors under the names, and in the shapes, that a mapping has them stored in: views of their own
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    views = _Views(held, answer["boxes"])
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
        out[name] = LocalBoxes(shape, views.take(count), dtype)
    zeros = [view for _, view in _Views(held, answer["zeros"]).take()]
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


class _Views:
    """Boxes that map_memory has found in `held`, one after another in `numbers`."""

    def __init__(self, held: Sequence[torch.Tensor], numbers: list[int]) -> None:
        self._held = [(part, part.storage_offset()) for part in held]
        self._numbers = numbers
        self._at = 0

    def take(self, count: int | None = None) -> list[tuple[list[int], torch.Tensor]]:
        """The next ones, or all: where each stands in its tensor, and where it is."""
        taken: list[tuple[list[int], torch.Tensor]] = []
        numbers, at = self._numbers, self._at
        while at < len(numbers) and (count is None or len(taken) < count):
            part, start = self._held[numbers[at]]
            offsets = at + 3
            sizes = offsets + numbers[at + 2]
            strides = sizes + numbers[at + 2]
            end = strides + numbers[at + 2]
            view = part.as_strided(
                numbers[sizes:strides], numbers[strides:end], start + numbers[at + 1]
            )
            taken.append((numbers[offsets:sizes], view))
            at = end
        self._at = at
        return taken
