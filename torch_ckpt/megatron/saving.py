"""Saves of Megatron's state dicts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt.calls.api import wait_for_saves_beside
from torch_ckpt.calls.async_save import async_save
from torch_ckpt.calls.futures import AsyncSave
from torch_ckpt.calls.save import Save
from torch_ckpt.checkpoint.megatron_form import BACKEND, WITH_OBJECT
from torch_ckpt.checkpoint.names import MEGATRON_COMMON, MEGATRON_CONFIG, MEGATRON_CONTENT
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.megatron.agreed import agree
from torch_ckpt.megatron.async_calls import StartableSave
from torch_ckpt.megatron.boxes import Box, Numbers
from torch_ckpt.megatron.config import CheckpointingConfig, CheckpointingException
from torch_ckpt.megatron.request import Request
from torch_ckpt.megatron.sharding import RankLayout, check_layouts, check_stored
from torch_ckpt.megatron.sharing import Share, share_out
from torch_ckpt.megatron.stored import COMMON_KEY, CONTENT_KEY
from torch_ckpt.megatron.strategies import Sharing
from torch_ckpt.objects import ObjectError, object_digest
from torch_ckpt.options import local_path
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.digests import Digest, differences, warn_of
from torch_ckpt.planning.local_boxes import LocalBoxes
from torch_ckpt.planning.reserved import RESERVED
from torch_ckpt.ranks import Ranks

# Keys, and names under which a save keeps what has no key.
_RESERVED = RESERVED | {COMMON_KEY, CONTENT_KEY, MEGATRON_COMMON, MEGATRON_CONTENT}


@dataclass(frozen=True)
class SaveOptions:
    """replicas: prove that each part has one main replica.
    sharing: where all that have a part offer to write it, and not its main replica alone, they do
        so for a main replica in the same group.
    preprocess: makes of the common state what is compared between ranks.
    content: what the checkpoint is to say of itself.
    """

    replicas: bool = True
    sharing: Sharing = Sharing()
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    content: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Said:
    """What a rank tells rank 0. sharers: the ranks that share with it, by their places."""

    layout: RankLayout
    digests: dict[str, bytes | int]
    sharers: set[int]


def save_now(
    state_dict: dict[Any, Any], path: str | os.PathLike[str], options: SaveOptions
) -> None:
    """Save the sharded `state_dict`. A collective call."""
    ranks = Ranks.of(None)
    with paused_gc(keeps=False):  # what is made on the way, rank 0 has that of all, is dropped
        state = _agreed_state(state_dict, ranks, options, beside=False)
        Save(_planner(options), _writer(path), path, ranks).run(lambda: state)


def prepared_save(
    state_dict: dict[Any, Any], path: str | os.PathLike[str], options: SaveOptions
) -> StartableSave:
    """The same, looked at now: it is staged, and goes on in the background, when it is started. A
    collective call, and so is starting it."""
    with paused_gc(keeps=False):
        held = [_agreed_state(state_dict, Ranks.of(None), options, beside=True)]
    place = local_path(path)  # it goes on in another working directory

    def start() -> AsyncSave:
        if not held:
            raise CheckpointingException("this save was begun already", file=place)
        return async_save(
            held.pop(), storage_writer=_writer(place), planner=_planner(options), on_busy="overlap"
        )

    return StartableSave(start)


def _planner(options: SaveOptions) -> SavePlanner:
    return SavePlanner(
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
        enable_plan_caching=options.sharing.memory is not None,
    )


def _writer(path: str | os.PathLike[str]) -> HuggingFaceStorageWriter:
    return HuggingFaceStorageWriter(path, layout="sharded", extras=_Config(), overwrite="all")


class _Config:
    """metadata.json, as a file that the commit brings along."""

    def save_pretrained(self, directory: str) -> None:
        text = json.dumps(asdict(CheckpointingConfig(BACKEND, WITH_OBJECT)))
        Path(directory, MEGATRON_CONFIG).write_text(text, encoding="utf-8")


def _agreed_state(
    state_dict: dict[Any, Any], ranks: Ranks, options: SaveOptions, *, beside: bool
) -> dict[str, Any]:
    """What this rank writes, flat. Rank 0 has looked whether the entries of all ranks fit, and
    raises CheckpointingException on all where they do not. Where the save does not go on `beside`
    others, these are waited for."""
    requests: list[Request] = []

    def say() -> _Said:
        if not beside:
            wait_for_saves_beside(ranks.size)
        requests.append(Request(state_dict))
        return _said(requests[0], ranks, options)

    def settle(said: list[_Said]) -> list[list[Share] | None]:
        layouts = [each.layout for each in said]
        check_layouts(layouts, whole=True, replicas=options.replicas)
        check_stored(layouts)
        warn_of(
            differences(_of_same_names([each.digests for each in said])),
            "rank 0's",
            "Common state is what all ranks have alike: make what is each rank's own a "
            "ShardedObject, or leave it out by preprocess_common_before_consistancy_check",
        )
        if not options.sharing.shares:
            return [None] * len(said)
        return [*share_out(layouts, [each.sharers for each in said])]

    def fields(said: _Said) -> tuple[Any, Any]:
        depends = (options.replicas, options.sharing.shares, said.layout, sorted(said.sharers))
        return depends, sorted(said.digests.items())

    share = agree(ranks, "what a save has", say, settle, options.sharing.memory, fields)
    request = requests[0]

    def collect() -> dict[str, Any]:
        boxes = [box for box in request.boxes if box.main]
        if share is not None:
            boxes = [request.boxes[place].rows(begin, end) for place, begin, end in share]
        return dict(_tensors(boxes))

    state = ranks.each("what a save writes", collect)
    state.update((cell.name, [cell.value]) for cell in request.cells if cell.main)
    if ranks.rank == 0:
        state[MEGATRON_COMMON] = [request.common]
        if options.content is not None:
            state[MEGATRON_CONTENT] = [options.content]
    return state


def _said(request: Request, ranks: Ranks, options: SaveOptions) -> _Said:
    _check_names(request)
    for box in request.boxes:
        if box.main and (box.data is None or box.data.is_meta):
            raise box.wrong(f"has no data to save here, and is a main replica: {box.words()}")
        if not box.is_inside():
            raise box.wrong(f"has a box that is not inside of it: {box.words()}")
    if options.content is not None and CONTENT_KEY in request.names:
        raise CheckpointingException(
            f"the state dict has values under '{CONTENT_KEY}', where content_metadata goes"
        )
    compared = request.common
    if options.replicas and options.preprocess is not None:
        compared = options.preprocess(compared)
    sharers = {ranks.rank}
    if options.sharing.shares:
        sharers |= ranks.places_of(options.sharing.group)
    return _Said(
        RankLayout.of(request.boxes, request.cells),
        _digests(compared) if options.replicas and ranks.size > 1 else {},
        sharers,
    )


def _check_names(request: Request) -> None:
    for leaf in request.leaves():
        if leaf.key in _RESERVED:
            raise CheckpointingException("this key is reserved: give it another", tensor=leaf.key)


def _tensors(boxes: list[Box]) -> Iterator[tuple[str, torch.Tensor]]:
    """What `boxes` are of each key."""
    held: dict[str, dict[tuple[Numbers, Numbers], Box]] = {}
    for box in boxes:
        held.setdefault(box.key, {})[box.offset, box.sizes] = box
    for key, of_key in held.items():
        first = next(iter(of_key.values()))
        if not math.prod(first.shape):  # each rank that has any of it has all
            yield key, torch.empty(first.shape, dtype=first.dtype, device="cpu")
            continue
        filled = [box for box in of_key.values() if box.elements]
        if len(filled) == 1 and filled[0].sizes == filled[0].shape:
            yield key, filled[0].memory()
        elif filled:
            yield key, LocalBoxes(first.shape, [(box.offset, box.memory()) for box in filled])


def _of_same_names(digests: list[dict[str, Digest]]) -> list[dict[str, Digest]]:
    """The same, where a rank that lacks a value has another one."""
    names = dict.fromkeys(name for of_rank in digests for name in of_rank)
    return [{name: of_rank.get(name, b"absent") for name in names} for of_rank in digests]


def _digests(common: dict[Any, Any]) -> dict[str, Digest]:
    """Of each value of the common state, by its path."""
    found: dict[str, Digest] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict | list) and value:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, entry in entries:
                # The key 1 is none of "1", nor "a.b" what "a" has under "b".
                word = key if isinstance(key, str) and key.isidentifier() else repr(key)
                visit(entry, f"{path}.{word}" if path else word)
            return
        try:
            found[path] = object_digest(value, path)
        except ObjectError:
            if dist.get_rank() == 0:
                raise  # it is the one that is saved
            found[path] = 0

    visit(common, "")
    return found
