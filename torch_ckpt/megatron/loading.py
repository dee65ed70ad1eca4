"""Loads of Megatron's state dicts."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torch_ckpt.calls.api import wait_for_saves_beside
from torch_ckpt.calls.load import Load
from torch_ckpt.checkpoint.checkpoint import look_again
from torch_ckpt.dcp.node import Node, numbers_of, this_node
from torch_ckpt.dcp.plan.items import read_items
from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.read.reader import CheckpointReader, ReplacedError, SeenSave, check_seen
from torch_ckpt.dcp.read.targets import copy_by_itself
from torch_ckpt.megatron.agreed import agree
from torch_ckpt.megatron.boxes import Box, Numbers, is_quantized
from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.deliveries import Asked, Reads, boxes_to_read, deliver, plan_reads
from torch_ckpt.megatron.integrity import verify_share
from torch_ckpt.megatron.request import Request
from torch_ckpt.megatron.sharding import RankLayout, check_layouts, in_words, listed
from torch_ckpt.megatron.stored import Stored
from torch_ckpt.megatron.strategies import Sharing
from torch_ckpt.megatron.strict import StrictHandling
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.local_boxes import LocalBoxes
from torch_ckpt.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """replicas: prove that what all ranks ask for is each part once, as main replicas.
    verify: compare every byte of the checkpoint with its digest first.
    group: the ranks that load together.
    sharing: where ranks share, what several nodes ask for is read on one of them, and sent to the
        others of the group.
    """

    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    replicas: bool = True
    verify: bool = False
    group: dist.ProcessGroup | None = None
    sharing: Sharing = Sharing()


class _Said(NamedTuple):
    """What a rank tells rank 0. seen: the save that it looks at. readers: the ranks, by their
    places, that read with it; None where it reads by itself."""

    seen: SeenSave
    layout: RankLayout
    node: Node | None
    readers: frozenset[int] | None


class Loaded(NamedTuple):
    """missing, unexpected: keys, where `strict` asks for them."""

    state: dict[Any, Any]
    missing: set[str]
    unexpected: set[str]


def load_request(
    state_dict: dict[Any, Any], path: str | os.PathLike[str], options: LoadOptions
) -> Loaded:
    """Load what `state_dict` asks for. A collective call of the ranks of the group."""
    ranks = Ranks.of(options.group)
    try:
        with paused_gc(keeps=False):  # what is made on the way, rank 0 has that of all, is dropped
            return look_again(lambda: _loaded(state_dict, path, options, ranks), ReplacedError)
    except CheckpointingException as error:  # others say what they are about, a file or ranks
        error.file = error.file or os.fsdecode(path)
        raise


def _loaded(
    state_dict: dict[Any, Any], path: str | os.PathLike[str], options: LoadOptions, ranks: Ranks
) -> Loaded:
    found: list[tuple[Request, Stored]] = []

    def ask() -> _Said:
        wait_for_saves_beside(ranks.size)
        stored = Stored(path)
        if options.verify:
            verify_share(stored, (ranks.rank, ranks.size))
        found.append((Request(state_dict), stored))
        request = found[0][0]
        shares, group, _ = options.sharing
        readers = frozenset(ranks.places_of(group)) if shares else None
        seen = SeenSave(ranks.rank, stored.save_id)
        return _Said(seen, RankLayout.of(request.boxes, request.cells), this_node(), readers)

    def settle(said: list[_Said]) -> list[tuple[set[str], set[str], Reads]]:
        seen, layouts, nodes, readers = zip(*said, strict=True)
        check_seen(found[0][1].path, seen)
        check_layouts(layouts, whole=options.replicas, replicas=options.replicas)
        keys = _settled(layouts, found[0][1].keys(), options.strict)
        asked = [*map(Asked, layouts, numbers_of(nodes), readers)]
        return [(*of_rank, reads) for of_rank, reads in zip(keys, plan_reads(asked), strict=True)]

    def fields(said: _Said) -> tuple[Any, Any]:
        depends = (options.strict, options.replicas, sorted(found[0][1].keys()))
        return (said.layout, said.node, sorted(said.readers or ()), depends), said.seen.save_id

    memory = options.sharing.memory
    missing, unexpected, reads = agree(ranks, "what a load asks for", ask, settle, memory, fields)
    request, stored = found[0]
    for leaf in request.leaves():
        leaf.absent = leaf.key in unexpected
    values = _read(request, stored, reads, ranks)
    deliver(request.boxes, reads, ranks)
    state: dict[Any, Any] = {}

    def answer() -> None:
        for cell in request.cells:
            if not cell.absent:
                name = stored.name_of(cell.name)
                cell.value = stored.object_of(values[name], name)
        for box in request.boxes:
            if box.quantized is not None:
                assert box.data is not None
                copy_by_itself(box.quantized, box.data, box.key)
                box.data = box.quantized
        state.update(request.answer(stored.common_of(values)))

    ranks.together("what a load gives", answer)
    _tell(options.strict, ranks.rank, missing, unexpected)
    if options.strict is StrictHandling.IGNORE_ALL:
        missing, unexpected = set(), set()
    return Loaded(state, {*missing}, {*unexpected})  # which the caller may change


def _settled(
    asked: Sequence[RankLayout], stored: set[str], strict: StrictHandling
) -> list[tuple[set[str], set[str]]]:
    """Missing and unexpected keys of each rank."""
    keys = [each.keys() for each in asked]
    unexpected = [of_rank - stored for of_rank in keys]
    looks_at_all = strict in (
        StrictHandling.LOG_ALL,
        StrictHandling.RAISE_ALL,
        StrictHandling.RETURN_ALL,
    )
    missing = stored.difference(*keys) if looks_at_all else set()
    raises = strict in (
        StrictHandling.ASSUME_OK_UNEXPECTED,
        StrictHandling.RAISE_UNEXPECTED,
        StrictHandling.RAISE_ALL,
    )
    wrong = []
    if raises and any(unexpected):
        asking: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(unexpected):
            for key in of_rank:
                asking.setdefault(key, []).append(rank)
        words = [f"{key} ({in_words(of_key)})" for key, of_key in sorted(asking.items())]
        wrong.append(f"Unexpected keys, which are asked for and not stored: {listed(words)}")
    if strict is StrictHandling.RAISE_ALL and missing:
        words = sorted(missing)
        wrong.append(f"Missing keys, which are stored and no rank asks for: {listed(words)}")
    if wrong:
        raise CheckpointingException("; ".join(wrong))
    return [(missing, each) for each in unexpected]


def _tell(strict: StrictHandling, rank: int, missing: set[str], unexpected: set[str]) -> None:
    if strict not in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        return
    if unexpected:
        logger.warning(
            "Unexpected keys, which rank %d asks for and are not stored; they are left out: %s",
            rank,
            listed(sorted(unexpected)),
        )
    if missing and rank == 0:
        logger.warning(
            "Missing keys, which are stored and no rank asks for: %s", listed(sorted(missing))
        )


def _read(request: Request, stored: Stored, reads: Reads, ranks: Ranks) -> dict[str, Any]:
    """Fill the boxes of `request` that this rank reads. Returns the values of what else it reads,
    by name."""
    names = stored.common_names()

    def state() -> dict[str, Any]:
        targets: dict[str, Any] = dict.fromkeys(names)
        cells = (cell for cell in request.cells if not cell.absent)
        targets.update((stored.name_of(cell.name), None) for cell in cells)
        shapes = stored.shapes()
        for box in request.boxes:
            if not box.absent:
                _check_stored(box, shapes)  # also what another rank reads
                _make_memory(box)
        targets.update(_targets(boxes_to_read(request.boxes, reads), shapes))
        return targets

    values = ranks.each("where a load goes", state)
    reader = CheckpointReader(stored.path, format=stored.format)
    beside = {(request.boxes[at].key, request.boxes[at].offset) for at in reads.beside}
    Load(_Planner(beside, stored, reader), reader, stored.path, ranks).run(values)
    return values


class _Planner(LoadPlanner):
    """Of a flat state dict, which has all that is asked for of `stored`. beside: of which boxes it
    is known that another rank of this node reads them, too; of no others."""

    def __init__(
        self, beside: set[tuple[str, Numbers]], stored: Stored, reader: CheckpointReader
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._beside = beside
        self._source = stored
        self._reader = reader

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        first, now = self._source.save_id, self._reader.save_id
        if first != now:
            raise ReplacedError(
                f"was replaced while it was loaded: save {first or 'none'} first, {now or 'none'} "
                "now",
                file=self._source.path,
            )
        saved = self.metadata.state_dict_metadata
        items = []
        for name, target in self.state_dict.items():
            if name not in saved:
                raise CheckpointingException("is not in the checkpoint", tensor=name)
            items += read_items(name, saved[name], target)
        return LoadPlan(items)

    def is_read_beside(self, item: ReadItem) -> bool:
        return (item.storage_index.fqn, tuple(item.storage_offsets)) in self._beside


def _make_memory(box: Box) -> None:
    """Where there is none, and beside what is quantized."""
    if box.data is not None and is_quantized(box.data):
        box.quantized, box.data = box.data.detach(), None
    if box.data is None or box.data.is_meta:
        box.data = torch.empty(box.sizes[box.prepended :], dtype=box.dtype, device="cpu")
    box.data = box.data.detach()


def _check_stored(box: Box, shapes: dict[str, Numbers | None]) -> None:
    """Raises CheckpointingException where `box` is not to be had of what is stored."""
    shape = shapes.get(box.key)
    if shape is None:
        raise box.wrong("is an object in the checkpoint, and a tensor is asked for")
    alike = shape == box.shape and box.is_inside()
    if alike or (box.bends and len(shape) == len(box.shape)):
        return
    what = "is stored with shape" if shape != box.shape else "is not inside of"
    raise box.wrong(f"{what} {list(shape)}; asked for is {box.words()}")


def _targets(boxes: list[Box], shapes: dict[str, Numbers | None]) -> dict[str, torch.Tensor]:
    """What a load fills, by key: the memory of each box."""
    held: dict[str, list[tuple[Numbers, torch.Tensor]]] = {}
    for box in boxes:
        shape = shapes[box.key]
        assert shape is not None
        place = _place(box, shape)
        if place is not None:
            held.setdefault(box.key, []).append(place)
    targets: dict[str, torch.Tensor] = {}
    for key, places in held.items():
        shape = shapes[key]
        assert shape is not None
        offset, memory = places[0]
        is_whole = len(places) == 1 and tuple(memory.shape) == shape
        targets[key] = memory if is_whole else LocalBoxes(shape, places)
    return targets


def _place(box: Box, shape: Numbers) -> tuple[Numbers, torch.Tensor] | None:
    """Where in a tensor of `shape` that is stored the memory of `box` is filled from, and what of
    it; the rest is zeros. None where nothing is."""
    memory = box.memory()
    if shape == box.shape and box.is_inside():
        return (box.offset, memory) if box.elements else None
    memory.zero_()
    sizes = [
        min(size, whole - at) for size, whole, at in zip(box.sizes, shape, box.offset, strict=True)
    ]
    if min(sizes, default=1) <= 0:
        return None
    for axis, size in enumerate(sizes):
        memory = memory.narrow(axis, 0, size)
    return (box.offset, memory) if math.prod(sizes) else None
