"""SavePlanner and LoadPlanner: the stock planners, exact about boxes, keys and containers.

Beyond stock: a DTensor is planned as its true boxes; keys that are not str, empty containers and
types of mappings survive; values of single ranks can be kept (PerRank); leaves that differ between
ranks are named. Planning pauses the garbage collector, which otherwise walks all that is being
built over and over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _compare_save_plans, _init_state_dict
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.boxes import local_boxes, local_part
from torch_ckpt.dcp.flatten import (
    DIGESTS_KEY,
    STRUCTURE_FQN,
    Flat,
    Structure,
    check_structure,
    describe_structure,
    empty_container,
    merge_structures,
    rebuild,
)
from torch_ckpt.dcp.global_plan import assemble, dedup_plans, warn_of_differences
from torch_ckpt.dcp.items import PLAIN_TENSORS, read_items, write_items
from torch_ckpt.dcp.per_rank import PerRank, rank_part, saved_world_sizes
from torch_ckpt.errors import IncompleteError, InvalidArgumentError
from torch_ckpt.objects import ObjectError, object_digest

__all__ = ["LoadPlanner", "PerRank", "SavePlanner"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the cyclic garbage collector off inside the block.

    At its end what was made counts as old: freeze and unfreeze move all objects to the oldest
    generation without looking at them. Otherwise the first allocation afterwards would walk a
    plan's every object, which takes as long as making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else unfreeze would undo the trainer's own freeze
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None and world_size is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _dtensor_part(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The local data of the box of `tensor` at `index`."""
    if hasattr(tensor._local_tensor, "__get_tensor_shard__"):
        return find_state_dict_object({index.fqn: tensor}, index)  # type: ignore[no-any-return]
    for box in local_boxes(tensor, index.fqn):
        if index.offset is None or box.offsets == index.offset:
            return local_part(tensor, box)
    raise ValueError(f"{index.fqn}: this rank has no box at offset {index.offset}")


class SavePlanner(DefaultSavePlanner):
    """Stock's arguments, and keyword-only ones:

    keep_structure: write the leaf "torch_ckpt.structure" where the names of the leaves do not say
        the containers (keys that are not str, empty ones, OrderedDict, ...).
    rank, world_size: what PerRank values are saved under; the default group's if not given.

    Pickles. Raises InvalidArgumentError where two leaves get one name.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        keep_structure: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_replicated_tensors,
            dedup_save_to_lowest_rank,
            enable_plan_caching,
        )
        self.keep_structure = keep_structure
        self._rank = rank
        self._world_size = world_size
        # What this rank's state dict has, and, on the coordinator, what is written for all.
        self._structure: Structure | None = None
        self._written_structure: Structure | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator
        self._structure = None
        if not self.flatten_state_dict:
            if self.flatten_sharded_tensors:
                state_dict = _flatten_sharded_tensors(state_dict)
            self.state_dict = state_dict
            return
        with paused_gc():
            flat = Flat(state_dict, *_world(self._rank, self._world_size))
            if flat.structured and self.keep_structure:
                self._structure = describe_structure(state_dict)
            self.mappings = flat.paths
            self.state_dict = flat.values
            if flat.has_sharded_tensor and self.flatten_sharded_tensors:
                self.state_dict = _flatten_sharded_tensors(flat.values)

    def create_local_plan(self) -> SavePlan:
        with paused_gc():
            items: list[WriteItem] = []
            for fqn, value in self.state_dict.items():
                items += write_items(fqn, value)
            plan = SavePlan(items, planner_data=self._planner_data())
        self.plan = plan
        if not self._enable_plan_caching:
            return plan
        cached = self._cached_save_plan.get(self._cached_plans_key)
        if cached is not None and _same_plan(plan, cached):
            return SavePlan([], usable=False)
        self._pending_local_plan = plan
        return plan

    def _planner_data(self) -> dict[str, Any] | None:
        """The paths, as stock has them, and beside them what the coordinator is to compare."""
        if not self.flatten_state_dict:
            return None
        data: dict[str, Any] = dict(self.mappings)
        if self._structure is not None:
            data[STRUCTURE_FQN] = self._structure
        rank, world_size = _world(self._rank, self._world_size)
        if world_size > 1:
            data[DIGESTS_KEY] = self._digests(rank_part(rank, world_size))
        return data

    def _digests(self, own_part: str) -> dict[str, bytes]:
        digests = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) or fqn.endswith(own_part):
                continue
            try:
                digests[fqn] = object_digest(value, fqn)
            except ObjectError:
                continue  # whether it can be written at all is for the storage writer to say
        return digests

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return dedup_plans(all_plans, self.dedup_save_to_lowest_rank)

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with paused_gc():
            plans, metadata = assemble(self._dedup_save_plans(all_plans))
            if not self.flatten_state_dict:
                return plans, metadata
            structures = []
            merged: dict[str, Any] = {}
            for plan in reversed(plans):  # as stock: the lowest rank's path holds
                merged.update(plan.planner_data or {})
                structures.append((plan.planner_data or {}).get(STRUCTURE_FQN))
            merged.pop(DIGESTS_KEY, None)
            merged.pop(STRUCTURE_FQN, None)
            structure = merge_structures(reversed(structures))
            if structure is not None:
                # Not in state_dict_metadata: stock planners must not take it for a leaf.
                merged[STRUCTURE_FQN] = structure
                item = WriteItem(MetadataIndex(STRUCTURE_FQN), WriteItemType.BYTE_IO)
                plans = [dataclasses.replace(plans[0], items=[*plans[0].items, item]), *plans[1:]]
            metadata.planner_data = merged
        return plans, metadata

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # A plan that is not usable stands for a cached one, whose digests are of an earlier save.
        if len(all_plans) > 1 and all(plan.usable for plan in all_plans):
            digests = [(plan.planner_data or {}).get(DIGESTS_KEY, {}) for plan in all_plans]
            warn_of_differences(digests)
        plans, metadata = super().create_global_plan(all_plans)
        self._written_structure = (metadata.planner_data or {}).get(STRUCTURE_FQN)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan: SavePlan = super().finish_plan(new_plan)
        pending = self.__dict__.pop("_pending_local_plan", None)
        if pending is not None:  # torch before 2.13 does not promote it
            self._cached_save_plan[self._cached_plans_key] = pending
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        if type(value) in PLAIN_TENSORS:
            return value
        if isinstance(value, DTensor):
            return _dtensor_part(value, index)
        if index.fqn == STRUCTURE_FQN and index.fqn not in self.state_dict:
            return self._written_structure
        return find_state_dict_object(self.state_dict, index)


def _same_plan(plan: SavePlan, cached: SavePlan) -> bool:
    """Stock's comparison, which knows neither dtypes nor the structure."""
    if not _compare_save_plans(plan, cached):
        return False
    for item, other in zip(plan.items, cached.items, strict=True):
        data, other_data = item.tensor_data, other.tensor_data
        if data is not None and other_data is not None:
            if data.properties.dtype != other_data.properties.dtype:
                return False
    new, old = plan.planner_data or {}, cached.planner_data or {}
    return bool(new.get(STRUCTURE_FQN) == old.get(STRUCTURE_FQN))


def _saved_structure(metadata: Metadata) -> Structure | None:
    """The structure, where the checkpoint has one and the reader has put it among the paths."""
    value = (metadata.planner_data or {}).get(STRUCTURE_FQN)
    return check_structure(value) if isinstance(value, dict) else None


class MissingKeyError(IncompleteError, RuntimeError):
    """The target has a leaf that the checkpoint has not. Stock raises RuntimeError."""


class LoadPlanner(DefaultLoadPlanner):
    """Stock's arguments, and keyword-only ones:

    strict_dtype: carried for the storage reader: refuse any cast.
    rebuild: an empty target is filled with everything the checkpoint has, nested as it was saved.
        dcp.load hands over a copy of its target, so take the result from `original_state_dict`.
    rank, world_size: whose PerRank values are loaded; the default group's if not given.

    A storage reader of torch_ckpt gives objects to `load_object`; `load_bytes`, for other readers,
    takes what torch.save wrote and reads it as stock does. Pickles.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict_dtype: bool = False,
        rebuild: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.strict_dtype = strict_dtype
        self.rebuild = rebuild
        self._rank = rank
        self._world_size = world_size
        self._slots: dict[str, tuple[Any, Any]] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if self.rebuild and not state_dict and metadata is not None:
            with paused_gc():
                state_dict.update(self._rebuilt(metadata))
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self._slots = None
            return
        rank, world_size = _world(self._rank, self._world_size)
        with paused_gc():
            flat = Flat(state_dict, rank, world_size, slots=True)
            if flat.has_meta:
                _init_state_dict(state_dict)
                flat = Flat(state_dict, rank, world_size, slots=True)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings, self._slots = flat.values, flat.paths, flat.slots
        if flat.has_sharded_tensor and self.flatten_sharded_tensors:
            self.state_dict = _flatten_sharded_tensors(flat.values)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def _rebuilt(self, metadata: Metadata) -> dict[Any, Any]:
        """A state dict for everything in `metadata`, with new tensors and None for objects."""
        paths = metadata.planner_data or {}
        structure = _saved_structure(metadata)
        rank, world_size = _world(self._rank, self._world_size)
        per_rank = {
            f"{'.'.join(map(str, path))}.": tuple(path)
            for path in (structure["per_rank"] if structure is not None else ())
        }
        values: dict[str, Any] = {}
        own_paths = {fqn: path for fqn, path in paths.items() if fqn != STRUCTURE_FQN}
        for fqn, saved in metadata.state_dict_metadata.items():
            if fqn == STRUCTURE_FQN:
                continue
            value = None
            if isinstance(saved, TensorStorageMetadata):
                value = torch.empty(saved.size, dtype=saved.properties.dtype)
            prefix, _, part = fqn.rpartition(".")
            path = per_rank.get(f"{prefix}.")
            if path is not None and part.startswith("__rank_"):
                values.setdefault(prefix, PerRank())
                own_paths[prefix] = path
                if part == rank_part(rank, world_size):
                    values[prefix].value = value
            else:
                values[fqn] = value
        return rebuild(values, own_paths, structure)

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise InvalidArgumentError("set_up_planner was not given the checkpoint's metadata")
        saved = self.metadata.state_dict_metadata
        if self._slots is None:
            return super().create_local_plan()
        missing = [fqn for fqn in self.state_dict if fqn not in saved]
        if missing and self._is_old_format():
            return super().create_local_plan()
        with paused_gc():
            for fqn in missing:
                self._settle_missing(fqn)
            items: list[ReadItem] = []
            for fqn, value in self.state_dict.items():
                entry = saved.get(fqn)
                if entry is not None:
                    if isinstance(entry, BytesStorageMetadata) and isinstance(value, torch.Tensor):
                        logger.warning(
                            "%s: the target has a tensor, the checkpoint an object, which will "
                            "take its place",
                            fqn,
                        )
                    items += read_items(fqn, entry, value)
        return LoadPlan(items)

    def _is_old_format(self) -> bool:
        """Whether the checkpoint names leaves as torch up to 2.3 did. If so, stock loads it."""
        assert self.metadata is not None
        saved, current = self.metadata.state_dict_metadata, self.state_dict
        found = False

        def visit(path: tuple[Any, ...], value: Any) -> None:
            nonlocal found
            name = ".".join(map(str, path))
            found |= name in saved and name not in current and type(value) is not PerRank

        traverse_state_dict_v_2_3(self.original_state_dict, visit)
        if not found:
            return False
        self._slots = None
        return True

    def _settle_missing(self, fqn: str) -> None:
        """A target leaf that the checkpoint has no entry for: settle it, skip it, or raise."""
        assert self.metadata is not None and self._slots is not None
        container, key = self._slots[fqn]
        empty = empty_container(_saved_structure(self.metadata), self.mappings[fqn])
        if empty is not None and not isinstance(container, PerRank):
            container[key] = empty
            return
        per_rank = isinstance(container, PerRank)
        path = fqn.rpartition(".")[0] if per_rank else fqn
        sizes = saved_world_sizes(path, self.metadata.state_dict_metadata)
        _, world_size = _world(self._rank, self._world_size)
        if per_rank and sizes:
            raise InvalidArgumentError(
                f"{path}: this per-rank value was saved by {sizes[0]} ranks and cannot be loaded "
                f"by {world_size}; load with as many ranks, or leave it out of the target"
            )
        if self.allow_partial_load:
            return
        hint = ""
        if per_rank and path in self.metadata.state_dict_metadata:
            hint = " It was saved as one value for all ranks, not as PerRank."
        elif sizes:
            hint = " It was saved as PerRank; put a PerRank there in the target."
        raise MissingKeyError(f"Missing key in checkpoint state_dict: {path}.{hint}")

    def load_object(self, read_item: ReadItem, obj: Any) -> None:
        """Put the loaded object `obj` where `read_item` says. Once per object; in any thread."""
        fqn = read_item.dest_index.fqn
        if self._slots is None:
            if self.flatten_state_dict:  # names of torch up to 2.3
                set_element(self.original_state_dict, self.mappings[fqn], obj)
            else:
                self.state_dict[fqn] = obj
            return
        container, key = self._slots[fqn]
        if isinstance(container, PerRank):
            container.value = obj
            return
        try:
            container[key] = obj
        except TypeError as error:
            raise InvalidArgumentError(
                f"{fqn}: the target's {type(container).__name__} does not take new values"
            ) from error

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self._slots is None:
            super().load_bytes(read_item, value)
            return
        # Stock's own way with what a stock storage reader brings; ours never comes here.
        stock = DefaultLoadPlanner(flatten_state_dict=False)
        stock.state_dict = {}
        stock.load_bytes(read_item, value)
        self.load_object(read_item, stock.state_dict[read_item.dest_index.fqn])

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        if type(value) in PLAIN_TENSORS:
            return value
        if isinstance(value, DTensor):
            return _dtensor_part(value, index)
        return find_state_dict_object(self.state_dict, index)  # type: ignore[no-any-return]

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.size() == read_item.lengths:
            return tensor
        return super().transform_tensor(read_item, tensor)  # type: ignore[no-any-return]
