"""Tensors under the names, and in the shapes, that a mapping has them stored in: views of their own
memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.checkpoint.quantization import all_scale_names
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native import core
from torch_ckpt.native.opened import PartlyUsed
from torch_ckpt.native.tensors import CODES, is_shapeless, memory_of, what_is_wrong
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
    """Of the tensors of a flat state, by name. What is each rank's own is none of them, nor is what
    has no shape of numbers."""
    return {
        name: Kind(tuple(value.shape), value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not is_shapeless(value)
        and not is_rank_part(name.rpartition(".")[2])
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
    natives: the tensors of the state that pairs name.
    zeros: views of what nothing is stored for.
    partly, unmatched: as those of native/opened.py's Mapped.
    """

    values: dict[str, Any]
    natives: list[torch.Tensor]
    zeros: list[torch.Tensor]
    partly: list[PartlyUsed]
    unmatched: frozenset[int]


def map_state(
    state: Mapping[str, Any],
    kinds: Kinds,
    pairs: Pairs,
    numbers: Mapping[str, int],
    stored: Kinds | None = None,
    *,
    makes_numbers: bool = False,
) -> MappedState:
    """`state`, flat, as it is stored.

    kinds: of the tensors of all ranks. stored: those that there are; None where they are to be
    made, and get the smallest shapes that have all elements. makes_numbers: who reads them makes
    numbers of codes for natives of floats, or refuses that. Raises InvalidArgumentError, naming
    pair and tensor, for what is no mapping of these (csrc/plan/tensor_map.h), UnsupportedError for
    tensors of which no parts are known, and for codes that would go without their scales.
    """
    names = list(kinds)
    held: list[torch.Tensor] = []
    boxes: list[dict[str, Any]] = []
    elsewhere: list[int] = []  # of these no parts are known
    for number, name in enumerate(names):
        parts = _parts(state.get(name), name)
        if parts is None:
            elsewhere.append(number)
            continue
        for offsets, part in parts:
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
        request["stored_shapes"] = [kind.shape for kind in stored.values()]
    answer = core.call(request)
    mapped = {names[at] for at in answer["mapped"]}
    for number in elsewhere:
        if names[number] in mapped:
            value = state[names[number]]
            raise UnsupportedError(
                f"is named by a pair of tensor_mapping, and {what_is_wrong(value)}",
                tensor=names[number],
            )
    made_names = core.listed_names(answer["names"])
    if stored is None:
        _check_scales(kinds, mapped, kinds.keys() - mapped)
    else:
        natives = zip(made_names, answer["natives"], strict=True)
        # What padding alone has goes nowhere.
        dtypes = {name: kinds[names[at]].dtype for name, at in natives if at >= 0}
        codes = {name for name, dtype in dtypes.items() if dtype in CODES}
        if not makes_numbers:  # nor refuses codes for floats
            _check_scales(stored, dtypes.keys() - codes, stored.keys())
        _check_scales(stored, codes, stored.keys() - dtypes.keys())
    out = {name: value for name, value in state.items() if name not in mapped}
    shapes = [torch.Size(shape) for shape in answer["shapes"]]
    views = _Views(held, answer["boxes"])
    columns = (answer[column] for column in ("shape_of", "natives", "counts"))
    for name, at, native, count in zip(made_names, *columns, strict=True):
        if native < 0:
            continue  # a pair with padding leaves it out
        if name in out or (name in kinds and name not in mapped):
            raise InvalidArgumentError(
                "is a stored tensor of tensor_mapping, and one that no pair names",
                tensor=name,
            )
        shape, dtype = shapes[at], kinds[names[native]].dtype
        if 0 in shape:  # no rank has a box of it, and it is stored all the same
            out[name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        boxes_of = views.take(count)
        try:
            out[name] = LocalBoxes(shape, boxes_of, dtype)
        except InvalidArgumentError as error:  # they are of several dtypes or devices
            raise InvalidArgumentError(f"by tensor_mapping: {error}", tensor=name) from None
    zeros = [view for _, view in _Views(held, answer["zeros"]).take()]
    partly = [PartlyUsed(*each) for each in answer["partly"]]
    tensors = [state[name] for name in names if name in mapped and name in state]
    return MappedState(out, tensors, zeros, partly, frozenset(answer["unmatched"]))


def _parts(value: Any, name: str) -> Iterator[tuple[Sequence[int], torch.Tensor]] | None:
    """What this rank has of a tensor: where it stands in the whole, and where it is; None of one
    whose elements are not in memory that a box of them can be told of."""
    if value is None:
        return iter(())
    if isinstance(value, LocalBoxes):
        return iter(value.boxes)
    if isinstance(value, DTensor):
        boxes = local_boxes(value, name)
        return ((box.offsets, local_part(value, box)) for box in boxes)
    memory = memory_of(value)
    return None if memory is None else iter([((0,) * memory.dim(), memory.detach())])


def _check_scales(kinds: Kinds, ones: Collection[str], others: Collection[str]) -> None:
    """Raises UnsupportedError for codes among `ones` whose scales are among `others`, or the other
    way round."""
    for name in sorted(kinds):
        if kinds[name].dtype not in CODES:
            continue
        for scale in all_scale_names(name):
            if scale not in kinds or not (
                (name in ones and scale in others) or (name in others and scale in ones)
            ):
                continue
            raise UnsupportedError(
                f"is codes, and '{scale}' are their scales: pairs of tensor_mapping have both, and "
                "tensors of codes for them, or neither",
                tensor=name,
            )


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
