"""Tensors of a load plan, in one native call; then those that the core cannot fill in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt.checkpoint.quantization import check_method, scale_names, with_numbers
from torch_ckpt.dcp.node import ranks_of_node
from torch_ckpt.dcp.plan import load_planner
from torch_ckpt.dcp.plan.stock_planner import has_method_of
from torch_ckpt.dcp.read.neighbours import wanted_by_neighbours
from torch_ckpt.dcp.read.targets import (
    check_places,
    check_target,
    copy_by_itself,
    copy_into,
    find_shared,
    find_tied,
    memories_of,
    same_parts,
)
from torch_ckpt.dcp.read.waves import (
    DEVICE_WAVE_BYTES,
    WAVE_BYTES,
    Request,
    carve,
    check_values,
    cut,
    padded,
    wait_for_copies,
    waves,
)
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError, warn
from torch_ckpt.native import core, operators
from torch_ckpt.native.dtypes import PACKED, TORCH_DTYPES, widens
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint, ScaledPair, StoredType
from torch_ckpt.native.tensors import CODES, PLAIN_TENSORS, memory_of, same_bits

_MOST_NAMED = 5
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


# What a later target has written over, and that one.
_Pairs = list[tuple[Request, Request]]


@dataclass(slots=True)
class _Shared:
    """What the target of a request has in common with those of others, by their numbers."""

    last: int  # of them all
    twin: int | None = None  # the last that has the same object
    parts: list[torch.Tensor] = field(default_factory=list)  # that are known


class TensorReader:
    """Reads the tensor items of one plan."""

    def __init__(
        self,
        opened: OpenedCheckpoint,
        types: Mapping[str, StoredType],
        *,
        workers: int,
        verify: bool,
        strict_dtype: bool,
        direct_io: bool,
        aliases: Mapping[str, str] | None = None,
        scaled: Collection[str] = (),
        made: Mapping[str, Sequence[int]] | None = None,
        warns: bool = True,
    ) -> None:
        """`types`, `aliases` and `scaled`: of the tensors of `opened`, as its listing has them;
        `made`: see shapes_of_bytes.
        `warns` of targets that cannot hold every value of what is stored."""
        self.opened = opened
        self.types = types
        self.aliases = aliases or {}
        self.scaled = frozenset(scaled)
        self.made = made or {}
        self.workers = workers
        self.verify = verify
        self.strict_dtype = strict_dtype
        self.direct_io = direct_io
        self.warns = warns
        self.ranks = ranks_of_node()

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Fill the planner's targets. Those that are one memory have what is stored for the last,
        and there is a warning where the checkpoint has other values for the rest.

        Raises UnsupportedError, InvalidArgumentError for what cannot be filled, before a byte is.
        """
        leaves = getattr(planner, "state_dict", None) or {}
        # What `resolve_tensor` would return for a plain tensor, after three calls.
        values = leaves if _resolves_as_stock(planner) else {}
        requests: list[Request] = []
        plain = True  # all of them
        # A planner of ours that was told says whether another rank of this node reads an item too.
        is_read_beside = getattr(planner, "is_read_beside", None)
        # Several boxes of one tensor are cast alike.
        casts: dict[tuple[str, torch.dtype], Request] = {}
        for item in items:
            fqn = item.storage_index.fqn
            target: Any = values.get(item.dest_index.fqn)
            if type(target) not in PLAIN_TENSORS or target.shape != item.lengths:
                target = planner.resolve_tensor(item)
                if target.shape != item.lengths:
                    raise InvalidArgumentError(
                        f"the target has {tuple(target.shape)}, the plan reads "
                        f"{tuple(item.lengths)}",
                        tensor=fqn,
                    )
            memory = memory_of(target)
            own_way = memory is None
            if memory is None:
                memory, plain = check_target(target, fqn), False
            elif memory.requires_grad:
                memory = memory.detach()
            name = "F32" if fqn in self.made else self.types[fqn].dtype
            offsets = list(item.storage_offsets)
            packed = PACKED.get(name, 1) if offsets else 1
            if packed > 1:
                offsets[-1] *= packed
            shared = self.ranks > 1 and (
                is_read_beside(item)
                if is_read_beside
                else wanted_by_neighbours(leaves.get(item.dest_index.fqn), item.lengths, self.ranks)
            )
            request = Request(item, memory, offsets, TORCH_DTYPES[name], packed, shared, own_way)
            requests.append(request)
            if memory.dtype is not request.stored:
                casts[fqn, memory.dtype] = request
        # Refuse before a byte is copied.
        if not self.strict_dtype:
            self._take_numbers(requests, [*casts.values()])
        for request in casts.values():
            self._check_cast(request)
        if self.warns:
            _warn_of_narrow(
                [
                    r
                    for (fqn, _), r in casts.items()
                    if fqn not in self.scaled and not widens(r.stored, r.target.dtype)
                ]
            )
        with self.opened.files_open(self.direct_io):
            if plain:
                tied, lost = self._fill_once(requests), _Pairs()
            else:
                tied, lost = self._fill_with_own_ways(requests)
            lost = [pair for pair in tied if not self._holds(*pair)] + lost
        _warn_of_tied(lost)
        for request in requests:
            planner.commit_tensor(request.item, request.target)

    def _take_numbers(self, requests: list[Request], casts: list[Request]) -> None:
        """Read the numbers that codes and scales are into targets of floats. Raises
        UnsupportedError for bytes that are two codes each, whose numbers have another shape."""
        codes = {
            request.item.storage_index.fqn
            for request in casts
            if request.target.dtype in _FLOATS and request.stored in CODES and request.packed == 1
        } - self.scaled
        made = {request.item.storage_index.fqn for request in requests} & self.made.keys()
        if not codes and not made:
            return
        check_method(self.opened, {fqn: self.types[fqn] for fqn in sorted(codes)})

        def is_wanted(pair: ScaledPair) -> bool:
            if pair.name in made:
                return True
            if pair.codes in codes and self.types[pair.codes].dtype in ("U8", "I8"):
                how = (
                    "load_model, convert and QuantizedHuggingFaceStorageReader make numbers of them"
                )
                if pair.name != pair.codes:
                    how = f"the numbers are called '{pair.name}'"
                raise UnsupportedError(
                    f"is stored as bytes of two codes each, to be multiplied by '{pair.scales}'; a "
                    f"cast would leave that out: {how}",
                    file=self.opened.path,
                    tensor=pair.codes,
                )
            # No numbers are made of others, which `_check_cast` says.
            return pair.codes in codes and not self.types[pair.codes].dtype.endswith("FNUZ")

        self.opened = with_numbers(self.opened, is_wanted, keeps_scales=True)
        self.scaled |= frozenset(self.opened.listing().scaled)
        for request in requests:
            if request.item.storage_index.fqn in self.scaled:
                request.stored = torch.float32  # in which they are made

    def _fill_with_own_ways(self, requests: list[Request]) -> tuple[_Pairs, _Pairs]:
        """Fill the targets; what fills itself, and what shares memory with that, one after the
        other. Returns what `_fill_once` does of the others; and of these the ones of which a later
        one has changed a part, each with the last that it shares one with."""
        common = _common_parts(requests)
        in_turn = {n: r for n, r in enumerate(requests) if r.own_way or n in common}
        tied = self._fill_once([r for n, r in enumerate(requests) if n not in in_turn])
        values: dict[int, torch.Tensor] = {}
        parts: dict[int, list[torch.Tensor]] = {}
        for number, request in in_turn.items():
            value = self._fill_by_copy(request) if request.own_way else None
            if value is None:
                self._fill([request])
            if number in common:
                parts[number] = [part.clone() for part in common[number].parts]
                if value is not None and common[number].twin is not None:
                    values[number] = value
        lost = [
            (requests[number], requests[shared.last])
            for number, shared in common.items()
            if not same_parts(parts[number], shared.parts)
            or (shared.twin is not None and not same_parts([values[number]], [values[shared.twin]]))
        ]
        return tied, lost

    def _fill_once(self, requests: list[Request]) -> _Pairs:
        """Fill the targets, of those that are one memory the last. Returns the others, each with
        that one."""
        # The operator sees at no cost that no two have a common address, as a rule.
        if all(map(_in_place, requests)) and self._fill_in_place(requests, meeting="return"):
            return []
        tied, alone = self._tied(requests)
        self._fill(alone)
        return tied

    def _tied(self, requests: list[Request]) -> tuple[_Pairs, list[Request]]:
        """Those in the memory of a later one, each with that one; and those that are read."""
        groups = find_tied([r.item.dest_index.fqn for r in requests], [r.target for r in requests])
        if not groups:
            return [], requests
        last = {number: group[-1] for group in groups for number in group[:-1]}
        tied = [(requests[number], requests[last[number]]) for number in sorted(last)]
        return tied, [request for number, request in enumerate(requests) if number not in last]

    def _holds(self, request: Request, filled: Request) -> bool:
        """Whether what is stored for `request` is what its target has by now, as `filled`: that is
        read and compared, unless both are one tensor of the checkpoint."""
        aliases = self.aliases
        own, other = (
            (aliases.get(name, name), r.offsets, r.target.dtype, r.target.shape, r.target.stride())
            for r in (request, filled)
            for name in (r.item.storage_index.fqn,)
        )
        if own == other:
            return True
        for part in cut(request, WAVE_BYTES):
            read = replace(part, target=torch.empty_like(part.target, requires_grad=False))
            self._fill([read])
            if not same_bits(read.target, part.target):
                return False
        return True

    def _fill(self, requests: list[Request]) -> None:
        direct: list[Request] = []
        indirect: list[Request] = []
        for request in requests:
            (direct if _in_place(request) else indirect).append(request)
        for request in indirect:
            check_places(request.target, request.item.storage_index.fqn)
        self._fill_in_place(direct, meeting="allow")
        self._read_in_waves(indirect)

    def _fill_in_place(self, requests: list[Request], meeting: str) -> bool:
        """Whether they are filled: not those of which spans meet, where `meeting` is "return"."""
        targets = [request.target for request in requests]
        try:
            return self._fetch(requests, targets, meeting)
        finally:  # an error may have filled some
            torch.autograd.graph.increment_version(targets)

    def _fill_by_copy(self, request: Request) -> torch.Tensor:
        """Read the box as it is stored, and let its target take it as it does. Returns it."""
        lengths, fqn = request.item.lengths, request.item.storage_index.fqn
        value = torch.empty(lengths, dtype=request.stored, device="cpu")
        self._fetch([replace(request, target=value)], [value])
        copy_by_itself(request.target, value, fqn)
        return value

    def _fetch(
        self, requests: list[Request], into: list[torch.Tensor], meeting: str | None = None
    ) -> bool:
        if not requests:
            return True
        plan: dict[str, Any] = {
            "checkpoint": self.opened.id,
            "workers": self.workers,
            "verify": self.verify,
            "direct_io": self.direct_io,
            "names": core.names_text([request.item.storage_index.fqn for request in requests]),
            "offsets": [request.offsets for request in requests],
            "meeting": meeting,
        }
        if self.ranks > 1:
            plan["shared"] = [i for i, request in enumerate(requests) if request.shared]
        with Job() as job:
            return "met" not in operators.read(into, plan, job)

    def _read_in_waves(self, requests: list[Request]) -> None:
        """Read through a piece of host memory; where a CUDA device is to copy from it, through two
        that are page-locked, so that the copies of one wave run while the next is read."""
        if not requests:
            return
        devices = {request.target.device for request in requests if request.target.is_cuda}
        pieces, most = (2, DEVICE_WAVE_BYTES) if devices else (1, WAVE_BYTES)
        room = min(most, sum(padded(request.size) for request in requests))
        memory: list[torch.Tensor] = []
        for number, wave in enumerate(waves(requests, most)):
            if number < pieces:
                memory.append(
                    torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=bool(devices))
                )
            held = carve(memory[number % pieces], wave)
            self._fetch(wave, held)
            # Copies from the other piece, which the wave after this one reads into.
            wait_for_copies(devices)
            for request, value in zip(wave, held, strict=True):
                copy_into(request.target, value)
                check_values(request, value)
        wait_for_copies(devices)

    def _check_cast(self, request: Request) -> None:
        fqn, source, target = request.item.storage_index.fqn, request.stored, request.target.dtype
        if self.strict_dtype:
            raise InvalidArgumentError(
                f"is stored as {source}, the target is {target} and strict_dtype is set", tensor=fqn
            )
        if source.is_complex and not target.is_complex:
            raise UnsupportedError(
                f"is stored as {source}; a cast to {target} would drop the imaginary part",
                tensor=fqn,
            )
        scales = (
            [name for name in scale_names(fqn) if name in self.types]
            if source in CODES and fqn not in self.scaled
            else []
        )
        if scales:
            raise UnsupportedError(
                f"is stored as {source}, to be multiplied by '{scales[0]}'; a cast to {target} "
                f"would leave that out: load it as {source}",
                tensor=fqn,
            )


def _resolves_as_stock(planner: LoadPlanner) -> bool:
    """Whether the target of an item that fills a whole tensor is what the flat state dict has."""
    ours = (DefaultLoadPlanner, load_planner.LoadPlanner)
    return (
        isinstance(planner, DefaultLoadPlanner)
        and has_method_of(planner, "resolve_tensor", DefaultLoadPlanner)
        and has_method_of(planner, "lookup_tensor", *ours)
        and has_method_of(planner, "transform_tensor", *ours)
    )


def _warn_of_narrow(requests: list[Request]) -> None:
    """One warning for all tensors whose targets cannot hold every value of what is stored."""
    if not requests:
        return
    said = [
        f"{r.item.storage_index.fqn}: stored as {r.stored}, loaded into {r.target.dtype}"
        for r in requests[:_MOST_NAMED]
    ]
    more = len(requests) - len(said)
    said += [f"and {more} more"] if more else []
    warn(f"{'; '.join(said)}; values may lose precision")


def _warn_of_tied(pairs: _Pairs) -> None:
    """One warning for all tensors that did not get what the checkpoint has for them."""
    names = dict.fromkeys((r.item.dest_index.fqn, last.item.dest_index.fqn) for r, last in pairs)
    if not names:
        return
    said = [f"'{name}' has the values of '{last}'" for name, last in list(names)[:_MOST_NAMED]]
    more = len(names) - len(said)
    said += [f"and {more} more"] if more else []
    warn(
        f"{'; '.join(said)}: they are one memory in the target, and other values in the checkpoint"
    )


def _common_parts(requests: list[Request]) -> dict[int, _Shared]:
    """By the number of a request: what its target has in common with others, of which one at least
    has a way of its own to be filled. Raises what `find_tied` does."""
    known: dict[int, _Shared] = {}
    objects: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        if request.own_way:
            objects.setdefault(id(request.target), []).append(number)
    for numbers in objects.values():
        if len(numbers) > 1:
            known.update({number: _Shared(numbers[-1], numbers[-1]) for number in numbers})
    names = [request.item.dest_index.fqn for request in requests]
    groups = find_shared(
        names, [memories_of(r.target) if r.own_way else [r.target] for r in requests]
    )
    for group in groups:
        if any(requests[number].own_way for number in group):
            for number, part in group.items():
                shared = known.setdefault(number, _Shared(number))
                shared.parts.append(part)
                shared.last = max(shared.last, *group)
    return known


def _in_place(request: Request) -> bool:
    """Whether the core can fill the target."""
    target = request.target
    if not (target.is_cpu and not target.is_conj() and not target.is_neg() and target.dim() <= 8):
        return False
    if target.dtype is not request.stored and not request.cast_by_core:
        return False
    return target.is_contiguous() or all(
        stride > 0 or size <= 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    )
