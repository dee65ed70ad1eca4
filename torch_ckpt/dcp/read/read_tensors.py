"""Tensors of a load plan, in one native call; then those that the core cannot fill in place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt.checkpoint.quantization import scale_names, with_numbers
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
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError, warn
from torch_ckpt.native import core, operators
from torch_ckpt.native.dtypes import DTYPE_NAMES, PACKED, TORCH_DTYPES, widens
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint, ScaledPair, StoredType
from torch_ckpt.native.tensors import PLAIN_TENSORS, memory_of, same_bits

# Host memory for tensors that cannot be read in place: a wave of at most this much; and two where
# devices copy from one while the other is read, so large that they seldom wait.
_WAVE_BYTES = 32 << 20
_DEVICE_WAVE_BYTES = 128 << 20
_ALIGNMENT = 64  # of a tensor in a wave, in bytes; more than any dtype needs
_MOST_NAMED = 5
# Floats that are kept beside scales.
_CODES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
_MAYBE_CODES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8})
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
# What the core casts to each other while it reads, and refuses where a value would be lost.
_CAST_BY_CORE = frozenset(TORCH_DTYPES[name] for name in core.CASTABLE if name in TORCH_DTYPES)


@dataclass(slots=True)
class _Request:
    item: ReadItem
    target: torch.Tensor  # what the planner gave
    offsets: list[int]  # in elements of the header
    stored: torch.dtype
    packed: int = 1  # elements of the header per element of the target, in the last dimension
    shared: bool = False  # another rank of this node loads it too
    own_way: bool = False  # the target has no memory that is known: its own `copy_` fills it

    @property
    def held(self) -> torch.dtype:
        """The dtype in a wave: the target's if the core casts to it and it is no larger, else the
        stored one."""
        to = self.target.dtype
        return to if to.itemsize <= self.stored.itemsize and self.cast_by_core else self.stored

    @property
    def cast_by_core(self) -> bool:
        return self.stored in _CAST_BY_CORE and self.target.dtype in _CAST_BY_CORE

    @property
    def size(self) -> int:
        """Bytes of the box in a wave."""
        return self.target.numel() * self.held.itemsize


# What a later target has written over, and that one.
_Pairs = list[tuple[_Request, _Request]]


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
        warns: bool = True,
    ) -> None:
        """`types`, `aliases` and `scaled`: of the tensors of `opened`, as its listing has them.
        `warns` of targets that cannot hold every value of what is stored."""
        self.opened = opened
        self.types = types
        self.aliases = aliases or {}
        self.scaled = frozenset(scaled)
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
        requests: list[_Request] = []
        plain = True  # all of them
        # A planner of ours that was told says whether another rank of this node reads an item too.
        is_read_beside = getattr(planner, "is_read_beside", None)
        # Several boxes of one tensor are cast alike.
        casts: dict[tuple[str, torch.dtype], _Request] = {}
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
            name = self.types[fqn].dtype
            offsets = list(item.storage_offsets)
            packed = PACKED.get(name, 1) if offsets else 1
            if packed > 1:
                offsets[-1] *= packed
            shared = self.ranks > 1 and (
                is_read_beside(item)
                if is_read_beside
                else wanted_by_neighbours(leaves.get(item.dest_index.fqn), item.lengths, self.ranks)
            )
            request = _Request(item, memory, offsets, TORCH_DTYPES[name], packed, shared, own_way)
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

    def _take_numbers(self, requests: list[_Request], casts: list[_Request]) -> None:
        """Read the numbers that codes and scales are into targets of floats. Raises
        UnsupportedError for bytes that are two codes each, whose numbers have another shape."""
        codes = {
            request.item.storage_index.fqn
            for request in casts
            if request.target.dtype in _FLOATS and request.stored in _MAYBE_CODES
        } - self.scaled
        if not codes:
            return

        def is_wanted(pair: ScaledPair) -> bool:
            if pair.codes in codes and self.types[pair.codes].dtype in ("U8", "I8"):
                raise UnsupportedError(
                    f"is stored as bytes of two codes each, to be multiplied by '{pair.scales}'; a "
                    "cast would leave that out: load_model, convert and "
                    "QuantizedHuggingFaceStorageReader make numbers of them",
                    file=self.opened.path,
                    tensor=pair.codes,
                )
            return pair.codes in codes

        self.opened = with_numbers(self.opened, is_wanted, keeps_scales=True, keeps_names=True)
        self.scaled |= frozenset(self.opened.listing().scaled)
        for request in requests:
            if request.item.storage_index.fqn in self.scaled:
                request.stored = torch.float32  # in which they are made

    def _fill_with_own_ways(self, requests: list[_Request]) -> tuple[_Pairs, _Pairs]:
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

    def _fill_once(self, requests: list[_Request]) -> _Pairs:
        """Fill the targets, of those that are one memory the last. Returns the others, each with
        that one."""
        # The operator sees at no cost that no two have a common address, as a rule.
        if all(map(_in_place, requests)) and self._fill_in_place(requests, meeting="return"):
            return []
        tied, alone = self._tied(requests)
        self._fill(alone)
        return tied

    def _tied(self, requests: list[_Request]) -> tuple[_Pairs, list[_Request]]:
        """Those in the memory of a later one, each with that one; and those that are read."""
        groups = find_tied([r.item.dest_index.fqn for r in requests], [r.target for r in requests])
        if not groups:
            return [], requests
        last = {number: group[-1] for group in groups for number in group[:-1]}
        tied = [(requests[number], requests[last[number]]) for number in sorted(last)]
        return tied, [request for number, request in enumerate(requests) if number not in last]

    def _holds(self, request: _Request, filled: _Request) -> bool:
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
        for part in _parts(request, _WAVE_BYTES):
            read = replace(part, target=torch.empty_like(part.target, requires_grad=False))
            self._fill([read])
            if not same_bits(read.target, part.target):
                return False
        return True

    def _fill(self, requests: list[_Request]) -> None:
        direct: list[_Request] = []
        indirect: list[_Request] = []
        for request in requests:
            (direct if _in_place(request) else indirect).append(request)
        for request in indirect:
            check_places(request.target, request.item.storage_index.fqn)
        self._fill_in_place(direct, meeting="allow")
        self._read_in_waves(indirect)

    def _fill_in_place(self, requests: list[_Request], meeting: str) -> bool:
        """Whether they are filled: not those of which spans meet, where `meeting` is "return"."""
        targets = [request.target for request in requests]
        try:
            return self._fetch(requests, targets, meeting)
        finally:  # an error may have filled some
            torch.autograd.graph.increment_version(targets)

    def _fill_by_copy(self, request: _Request) -> torch.Tensor:
        """Read the box as it is stored, and let its target take it as it does. Returns it."""
        lengths, fqn = request.item.lengths, request.item.storage_index.fqn
        value = torch.empty(lengths, dtype=request.stored, device="cpu")
        self._fetch([replace(request, target=value)], [value])
        copy_by_itself(request.target, value, fqn)
        return value

    def _fetch(
        self, requests: list[_Request], into: list[torch.Tensor], meeting: str | None = None
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

    def _read_in_waves(self, requests: list[_Request]) -> None:
        """Read through a piece of host memory; where a CUDA device is to copy from it, through two
        that are page-locked, so that the copies of one wave run while the next is read."""
        if not requests:
            return
        devices = {request.target.device for request in requests if request.target.is_cuda}
        pieces, most = (2, _DEVICE_WAVE_BYTES) if devices else (1, _WAVE_BYTES)
        room = min(most, sum(_padded(request.size) for request in requests))
        memory: list[torch.Tensor] = []
        for number, wave in enumerate(_waves(requests, most)):
            if number < pieces:
                memory.append(
                    torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=bool(devices))
                )
            held = _carve(memory[number % pieces], wave)
            self._fetch(wave, held)
            # Copies from the other piece, which the wave after this one reads into.
            _wait_for_copies(devices)
            for request, value in zip(wave, held, strict=True):
                copy_into(request.target, value)
                _check_values(request, value)
        _wait_for_copies(devices)

    def _check_cast(self, request: _Request) -> None:
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
            if source in _CODES and fqn not in self.scaled
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


def _warn_of_narrow(requests: list[_Request]) -> None:
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


def _common_parts(requests: list[_Request]) -> dict[int, _Shared]:
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


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _parts(request: _Request, most: int) -> Iterator[_Request]:
    """The request in boxes of at most `most` bytes, cut along the outermost dimension that there
    is."""
    if request.size <= most:
        yield request
        return
    target = request.target
    dim = next(d for d, size in enumerate(target.shape) if size > 1)
    # Whole slices where they fit, else one slice, which is cut further.
    count = max(1, most * target.shape[dim] // request.size)
    scale = request.packed if dim == target.dim() - 1 else 1
    for first in range(0, target.shape[dim], count):
        part = target.narrow(dim, first, min(count, target.shape[dim] - first))
        offsets = list(request.offsets)
        offsets[dim] += first * scale
        yield from _parts(replace(request, target=part, offsets=offsets), most)


def _waves(requests: list[_Request], most: int) -> Iterator[list[_Request]]:
    wave: list[_Request] = []
    size = 0
    for request in requests:
        for part in _parts(request, most):
            if wave and size + _padded(part.size) > most:
                yield wave
                wave, size = [], 0
            wave.append(part)
            size += _padded(part.size)
    if wave:
        yield wave


def _carve(memory: torch.Tensor, wave: list[_Request]) -> list[torch.Tensor]:
    """Contiguous tensors of the wave's shapes and dtypes, one after another in `memory`."""
    held = []
    start = 0
    for request in wave:
        flat = memory[start : start + request.size].view(request.held)
        held.append(flat.view(request.target.shape))
        start += _padded(request.size)
    return held


def _wait_for_copies(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _in_place(request: _Request) -> bool:
    """Whether the core can fill the target."""
    target = request.target
    if not (target.is_cpu and not target.is_conj() and not target.is_neg() and target.dim() <= 8):
        return False
    if target.dtype is not request.stored and not request.cast_by_core:
        return False
    return target.is_contiguous() or all(
        stride > 0 or size <= 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    )


def _largest(dtype: torch.dtype) -> float:
    """The largest number that is rounded to a value of `dtype`."""
    info = torch.finfo(dtype)
    return float(info.max) + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2


def _check_values(request: _Request, value: torch.Tensor) -> None:
    """No value may change beyond rounding: a finite one stays finite, an integer the same."""
    source, target = value.dtype, request.target
    if widens(source, target.dtype):
        return
    fqn = request.item.storage_index.fqn
    result = target.to("cpu") if target.device.type != "cpu" else target
    if target.dtype.is_floating_point or target.dtype.is_complex:
        # float8 dtypes lack comparison kernels; float32 holds all of their values.
        wide = result.to(torch.float32) if target.dtype.itemsize == 1 else result
        was = value.to(torch.float32) if source.itemsize == 1 else value
        if source.is_floating_point or source.is_complex:
            lost = ~torch.isfinite(wide) & torch.isfinite(was)
        else:
            lost = ~torch.isfinite(wide)
        if target.dtype.itemsize == 1:
            # Some casts to float8 give the largest value where others give infinity.
            lost |= torch.isfinite(was) & (was.double().abs() > _largest(target.dtype))
            # Some have no infinity.
            lost |= torch.isinf(was) & ~torch.isinf(wide)
        if target.dtype == torch.float8_e8m0fnu:  # nor 0, nor a sign
            lost |= was.double() <= 0
        what = "out of range"
    else:
        lost = result.to(source) != value
        what = "another number"
    if bool(lost.any()):
        said, wanted = (DTYPE_NAMES.get(dtype, dtype) for dtype in (source, target.dtype))
        raise InvalidArgumentError(
            f"at least {int(lost.sum())} values of {said} would be {what} as {wanted}", tensor=fqn
        )
