"""SavePlanner: stock's, exact about boxes, keys, containers and values of single ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt.dcp.plan import plan_cache
from torch_ckpt.dcp.plan.global_plan import assemble, dedup_plans
from torch_ckpt.dcp.plan.items import WriteItems, dtensor_part, write_items
from torch_ckpt.dcp.plan.ties import FinalNames, drop_aliases
from torch_ckpt.export.renames import KeyMapping
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.native.torch_private import compare_save_plans, flatten_sharded_tensors
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.digests import differences, object_digests, tensor_digests, warn_of
from torch_ckpt.planning.flatten import (
    NO_STRUCTURE,
    Flat,
    Structure,
    describe_structure,
    merge_structures,
)
from torch_ckpt.planning.mapped_state import Kinds, kinds_of, map_state
from torch_ckpt.planning.per_rank import rank_part, world_of
from torch_ckpt.planning.renaming import new_names, rename, rename_paths, rename_words
from torch_ckpt.planning.reserved import DIGESTS_KEY, MAPPING_KEY, STRUCTURE_FQN, TIES_KEY
from torch_ckpt.tensor_mapping.mapping import Pairs, TensorMapping, checked_pairs


class _Begun(NamedTuple):
    members: tuple[int, ...] | None
    final: FinalNames | None
    kinds: Kinds | None


class SavePlanner(DefaultSavePlanner):
    """Stock's arguments, and keyword-only ones:

    enable_plan_caching: a rank whose plan is that of its last save does not send it again. Through
        another process group than the default one this needs torch_ckpt.save.
    keep_structure: write the leaf "torch_ckpt.structure" where the names of the leaves do not say
        the containers (keys that are not str, empty ones, OrderedDict, ...). What tensors that are
        made of others are is written in any case.
    rank, world_size: what PerRank values are saved under; the default group's if not given.
    key_mapping: other names to store tensors under: a function from name to name, or (regular
        expression, replacement) pairs, of which the first that is found in a name is applied. A
        renamed tensor stands outermost in the state dict that is saved, under its new name, which
        is also the one that a writer's options mean. Objects and PerRank values keep their names.
    tensor_mapping: pairs of views (stored, native), a table's name, a path or a dict, see
        docs/tensor_mapping.md: the stored tensors that pairs name stand outermost, in place of
        those that have their elements. Under stock's `save` each rank that has a part of one has,
        sharded or not, all tensors that it is made of; `torch_ckpt.save` asks all ranks. With
        use_collectives=False each rank's tensors are mapped by themselves.

    In a plan boxes that are alike share one TensorWriteData, and in the metadata tensors of the
    same boxes one TensorStorageMetadata: replace them, do not change them.

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
        key_mapping: KeyMapping | None = None,
        tensor_mapping: TensorMapping | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_replicated_tensors,
            dedup_save_to_lowest_rank,
            enable_plan_caching,
        )
        self.keep_structure = keep_structure
        self.key_mapping = key_mapping
        self.pairs: Pairs | None = None
        if tensor_mapping is not None:
            self.pairs = checked_pairs(tensor_mapping, key_mapping, flatten_state_dict)
        self._unmatched: list[int] = []  # pairs that mean no tensor of this rank
        self._rank = rank
        self._world_size = world_size
        self._begun: _Begun | None = None  # of the next save
        self._save = _Begun(None, None, None)  # of the save that is going on
        # What this rank's state dict has, and, on the coordinator, what is written for all.
        self._structure: Structure | None = None
        self._written_structure: Structure | None = None
        self._differing: dict[str, tuple[int, int]] = {}  # coordinator: see digests.differences

    def begin(
        self, members: tuple[int, ...], final: FinalNames | None, kinds: Kinds | None = None
    ) -> None:
        """Say of the save whose `set_up_planner` comes next what DCP does not say.

        members: the global ranks that save.
        final: what stands in final files, in which tied tensors are stored once; None for nothing.
        kinds: of the tensors of all ranks, where they are mapped together: what `own_kinds`
            says of each rank's.
        """
        self._begun = _Begun(members, final, kinds)

    def own_kinds(self, state_dict: dict[str, Any]) -> Kinds:
        """What this rank says of the tensors that a mapping may name."""
        return kinds_of(Flat(state_dict, *world_of(self._rank, self._world_size)).values)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._save, self._begun = self._begun or _Begun(None, None, None), None
        self.is_coordinator = is_coordinator
        self._structure = None
        if not self.flatten_state_dict:
            names = new_names(self.key_mapping, state_dict)
            state_dict = rename(state_dict, names) if names else state_dict
            if self.flatten_sharded_tensors:
                state_dict = flatten_sharded_tensors(state_dict)
            self.state_dict = state_dict
            return
        with paused_gc():
            flat = Flat(state_dict, *world_of(self._rank, self._world_size))
            names = new_names(self.key_mapping, flat.values)
            if flat.structured and self.keep_structure:
                self._structure = describe_structure(state_dict)
            if flat.words:
                said = rename_words(flat.words, names)
                self._structure = {**(self._structure or NO_STRUCTURE), "tensors": said}
            self.mappings = rename_paths(flat.paths, names) if names else flat.paths
            self.state_dict = rename(flat.values, names) if names else flat.values
            if self.pairs is not None:
                self._map(self.pairs)
            if flat.has_sharded_tensor and self.flatten_sharded_tensors:
                self.state_dict = flatten_sharded_tensors(self.state_dict)

    def _map(self, pairs: Pairs) -> None:
        own, kinds = kinds_of(self.state_dict), self._save.kinds
        if kinds is None or not own.items() <= kinds.items():
            kinds = own  # nobody has asked, or a subclass has changed what it was given
        mapped = map_state(self.state_dict, kinds, pairs, pairs.numbers_in())
        self.state_dict, self._unmatched = mapped.values, sorted(mapped.unmatched)
        self.mappings = {fqn: self.mappings.get(fqn, (fqn,)) for fqn in mapped.values}

    def create_local_plan(self) -> SavePlan:
        with paused_gc():
            plan = SavePlan(write_items(self.state_dict), planner_data=self._planner_data())
        self.plan = self._local_plan = plan
        if not self._enable_plan_caching:
            return plan
        ranks = world_of(self._rank, self._world_size)
        kind = type(self)
        name = (kind.__module__, kind.__qualname__, self._cached_plans_key)
        # With final files the coordinator is told more than the items, and caches that with them.
        final = None if self._save.final is None else self._save.final.beside
        self._cache_key = (*name, *ranks, self._save.members, final)
        last = self._last_plans = plan_cache.begin(self._cache_key)
        if last is not None and _same_plan(plan, last.local):
            return plan_cache.unchanged(last.token)
        return plan

    def _planner_data(self) -> dict[str, Any] | None:
        """The paths, as stock has them, and beside them what the coordinator is to compare."""
        if not self.flatten_state_dict:
            return None
        data: dict[str, Any] = dict(self.mappings)
        if self._structure is not None:
            data[STRUCTURE_FQN] = self._structure
        if self.pairs is not None:
            data[MAPPING_KEY] = self._unmatched
        if self._save.final is not None:
            ties = self._save.final.ties(self.state_dict)
            if ties:
                data[TIES_KEY] = ties
        rank, world_size = world_of(self._rank, self._world_size)
        if world_size > 1:
            digests = object_digests(self.state_dict, rank_part(rank, world_size))
            data[DIGESTS_KEY] = {**digests, **tensor_digests(self.state_dict)}
        return data

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return dedup_plans(all_plans, self.dedup_save_to_lowest_rank, self._differing)

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.pairs is not None:
            said = [(plan.planner_data or {}).get(MAPPING_KEY, ()) for plan in all_plans]
            self.pairs.check_matched(set(said[0]).intersection(*said[1:]))
        with paused_gc():
            all_plans, aliases = drop_aliases(all_plans)
            plans, metadata = assemble(self._dedup_save_plans(all_plans))
            if not self.flatten_state_dict:
                return plans, metadata
            entries = metadata.state_dict_metadata
            entries.update({alias: entries[name] for alias, name in aliases.items()})
            structures = []
            merged: dict[str, Any] = {}
            for plan in reversed(plans):  # as stock: the lowest rank's path holds
                merged.update(plan.planner_data or {})
                structures.append((plan.planner_data or {}).get(STRUCTURE_FQN))
            merged.pop(DIGESTS_KEY, None)
            merged.pop(MAPPING_KEY, None)
            merged.pop(TIES_KEY, None)
            if aliases:
                merged[TIES_KEY] = aliases
            merged.pop(STRUCTURE_FQN, None)
            structure = merge_structures(reversed(structures))
            if structure is not None:
                # Not in state_dict_metadata: stock planners must not take it for a leaf.
                merged[STRUCTURE_FQN] = structure
                item = WriteItem(MetadataIndex(STRUCTURE_FQN), WriteItemType.BYTE_IO)
                items = WriteItems([*plans[0].items, item])
                plans = [dataclasses.replace(plans[0], items=items), *plans[1:]]
            metadata.planner_data = merged
        return plans, metadata

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._differing = {}
        # A plan that is not usable stands for a cached one, whose digests are of an earlier save.
        if len(all_plans) > 1 and all(plan.usable for plan in all_plans):
            digests = [(plan.planner_data or {}).get(DIGESTS_KEY, {}) for plan in all_plans]
            self._differing = differences(digests)
            warn_of(
                self._differing,
                "the lowest rank's",
                "Wrap what is each rank's own in torch_ckpt.PerRank, to keep all",
            )
        if self._enable_plan_caching:
            plans, metadata = self._create_cached_global_plan(all_plans)
        else:
            plans, metadata = super().create_global_plan(all_plans)
        self._written_structure = (metadata.planner_data or {}).get(STRUCTURE_FQN)
        return plans, metadata

    def _create_cached_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        if len(all_plans) == 1:  # this rank's own, so nothing is saved by not sending it
            self.global_plan, self.metadata = self._create_global_plan([self._local_plan])
            return self.global_plan, self.metadata
        key = self._cache_key
        local, known, unchanged = plan_cache.whole_plans(key, all_plans)
        if known is not None and unchanged:
            self.global_plan, self.metadata = known.final, known.metadata
            return [plan_cache.unchanged(known.token)] * len(all_plans), known.metadata
        self.global_plan, self.metadata = self._create_global_plan(local)
        final = self.global_plan
        return plan_cache.remember(
            key, all_plans, local, final, self.metadata, known
        ), self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self._enable_plan_caching:
            plan: SavePlan = super().finish_plan(new_plan)
            return plan
        self.plan = plan_cache.finish(self._cache_key, self._local_plan, new_plan, self._last_plans)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        if type(value) in PLAIN_TENSORS:
            return value
        if isinstance(value, DTensor):
            return dtensor_part(value, index)
        if index.fqn == STRUCTURE_FQN and index.fqn not in self.state_dict:
            return self._written_structure
        return find_state_dict_object(self.state_dict, index)


def _same_plan(plan: SavePlan, cached: SavePlan) -> bool:
    """Stock's comparison, which knows neither dtypes nor paths and structure."""
    if not compare_save_plans(plan, cached):
        return False
    for item, other in zip(plan.items, cached.items, strict=True):
        data, other_data = item.tensor_data, other.tensor_data
        if data is not None and other_data is not None:
            if data.properties.dtype != other_data.properties.dtype:
                return False
    new, old = dict(plan.planner_data or {}), dict(cached.planner_data or {})
    new.pop(DIGESTS_KEY, None)
    old.pop(DIGESTS_KEY, None)
    return new == old
