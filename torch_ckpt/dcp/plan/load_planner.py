"""LoadPlanner: stock's, which fills the target in place whatever its keys and containers are."""

from __future__ import annotations

import dataclasses
import io
import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt.checkpoint.quantization import all_scale_names
from torch_ckpt.dcp.plan.items import dtensor_part, read_items
from torch_ckpt.dcp.plan.ties import identity
from torch_ckpt.errors import CheckpointError, InvalidArgumentError, MissingKeyError, warn
from torch_ckpt.export.renames import KeyMapping
from torch_ckpt.native.opened import PartlyUsed
from torch_ckpt.native.tensors import CODES, PLAIN_TENSORS
from torch_ckpt.native.torch_private import (
    flatten_sharded_tensors,
    init_state_dict,
    set_element,
    traverse_state_dict_v_2_3,
)
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.flatten import (
    Flat,
    Structure,
    check_structure,
    empty_containers,
    new_container,
    rebuild,
)
from torch_ckpt.planning.mapped_state import Kind, Kinds, MappedState, kinds_of, map_state
from torch_ckpt.planning.per_rank import (
    PerRank,
    is_rank_part,
    rank_part,
    saved_world_sizes,
    world_of,
)
from torch_ckpt.planning.renaming import new_names, rename_metadata
from torch_ckpt.planning.reserved import STRUCTURE_FQN
from torch_ckpt.planning.wrappers import Words, check_words
from torch_ckpt.tensor_mapping.mapping import (
    Pairs,
    Shapes,
    Sharing,
    TensorMapping,
    check_shared,
    checked_pairs,
)

logger = logging.getLogger(__name__)


_MOST_LISTED = 20


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _mismatch(said: list[str]) -> InvalidArgumentError:
    """One error for all leaves of the target that do not fit the checkpoint."""
    if len(said) == 1:
        return InvalidArgumentError(said[0])
    more = len(said) - _MOST_LISTED
    return InvalidArgumentError(
        f"{len(said)} leaves of the target do not fit the checkpoint: "
        + "; ".join(said[:_MOST_LISTED])
        + (f"; and {more} more" if more > 0 else "")
    )


def _saved_structure(metadata: Metadata) -> Structure | None:
    """The structure, where the checkpoint has one and the reader has put it among the paths."""
    value = (metadata.planner_data or {}).get(STRUCTURE_FQN)
    return check_structure(value) if isinstance(value, dict) else None


def _make_real(state_dict: dict[str, Any], flat: Flat) -> None:
    """Give the meta tensors of a target memory: where torch says, which asks the process group."""
    if dist.is_initialized():
        init_state_dict(state_dict)
        return
    assert flat.slots is not None
    for fqn, value in flat.values.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            container, key = flat.slots[fqn]
            made = torch.empty_like(value, device="cpu")
            if isinstance(container, PerRank):
                container.value = made
            else:
                container[key] = made


@dataclasses.dataclass
class StoredMetadata(Metadata):
    """DCP's Metadata, and what readers of ours say to this planner.

    numbers: tensors that are made of codes of other names where a target wants them.
    used_by_others: names that belong to others, as scales do: who leaves them alone has not
        forgotten them.
    makes_numbers: whether the reader makes numbers of codes for floats, or refuses these.
    path: of the checkpoint, for errors.
    """

    numbers: dict[str, TensorStorageMetadata] = dataclasses.field(default_factory=dict)
    used_by_others: frozenset[str] = frozenset()
    makes_numbers: bool = False
    path: str | None = None


class _Said(NamedTuple):
    """asked: the names of what a rank reads; None where they are all, as a rule, or their
    containers are not known."""

    asked: set[str] | None
    sharing: Sharing | None  # of a mapping


class LoadPlanner(DefaultLoadPlanner):
    """Stock's arguments, and keyword-only ones:

    strict_dtype: carried for the storage reader: refuse any cast.
    rebuild: an empty target is filled with everything the checkpoint has, nested as it was saved.
        dcp.load hands over a copy of its target, so take the result from `original_state_dict`.
    rank, world_size: whose PerRank values are loaded; the default group's if not given.
    key_mapping: as SavePlanner's, from the names of tensors in the checkpoint to those in the
        target.
    tensor_mapping: as SavePlanner's, the other way: the stored tensors that pairs name are read
        into the places that their elements have in the target.

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
        key_mapping: KeyMapping | None = None,
        tensor_mapping: TensorMapping | None = None,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.strict_dtype = strict_dtype
        self.rebuild = rebuild
        self._rank = rank
        self._world_size = world_size
        self.key_mapping = key_mapping
        self.pairs: Pairs | None = None
        if tensor_mapping is not None:
            self.pairs = checked_pairs(tensor_mapping, key_mapping, flatten_state_dict)
        self._mapped: MappedState | None = None
        self._sharing: Sharing | None = None
        self._of_saved: Kinds = {}  # of stored tensors, where these are mapped
        self._stored: dict[str, str] = {}  # names in the checkpoint, of what is renamed
        self._slots: dict[str, tuple[Any, Any]] | None = None
        self._empty: set[tuple[Any, ...]] = set()  # the paths of the target's empty mappings
        self._structure: Structure | None = None  # of what was saved
        self._words: dict[str, Words] = {}  # of the target's tensors that are made of others

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._stored = {}
        made: set[str] = set()  # numbers, by their names in the target
        if isinstance(metadata, StoredMetadata) and metadata.numbers and self._makes_numbers():
            saved = metadata.state_dict_metadata
            names = new_names(self.key_mapping, saved) | new_names(
                self.key_mapping, metadata.numbers
            )
            taken = {names.get(name, name) for name in saved}  # maybe by the codes
            numbers = {
                name: entry
                for name, entry in metadata.numbers.items()
                if names.get(name, name) not in taken
            }
            made = {names.get(name, name) for name in numbers}
            metadata = dataclasses.replace(metadata, state_dict_metadata={**saved, **numbers})
        if metadata is not None and self.key_mapping is not None:
            names = new_names(self.key_mapping, metadata.state_dict_metadata)
            metadata = rename_metadata(metadata, names)
            self._stored = {new: stored for stored, new in names.items()}
        self._structure = _saved_structure(metadata) if metadata is not None else None
        if self.rebuild and not state_dict and metadata is not None:
            if self.pairs is not None:
                raise InvalidArgumentError("tensor_mapping needs a state_dict to load into")
            with paused_gc():
                state_dict.update(self._rebuilt(metadata))
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self._slots = None
            return
        world = world_of(self._rank, self._world_size)
        # What was saved in one piece is loaded by a target's own `copy_`.
        whole = metadata.state_dict_metadata if metadata is not None else ()
        with paused_gc():
            flat = Flat(state_dict, *world, slots=True, whole=whole)
            if flat.has_meta:
                _make_real(state_dict, flat)
                flat = Flat(state_dict, *world, slots=True, whole=whole)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings, self._slots = flat.values, flat.paths, flat.slots
        self._empty, self._words = flat.empty, flat.words
        if flat.has_sharded_tensor and self.flatten_sharded_tensors:
            self.state_dict = flatten_sharded_tensors(flat.values)
        if self.pairs is not None and metadata is not None:
            self._map(self.pairs, metadata)
        if metadata is not None and made - self.state_dict.keys():
            entries = {
                fqn: entry
                for fqn, entry in metadata.state_dict_metadata.items()
                if fqn not in made or fqn in self.state_dict
            }
            metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def _map(self, pairs: Pairs, metadata: Metadata) -> None:
        self._of_saved = {
            fqn: Kind(tuple(saved.size), saved.properties.dtype)
            for fqn, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        kinds = kinds_of(self.state_dict)
        try:
            mapped = map_state(
                self.state_dict,
                kinds,
                pairs,
                pairs.numbers_in(),
                self._of_saved,
                makes_numbers=isinstance(metadata, StoredMetadata) and metadata.makes_numbers,
            )
        except CheckpointError as error:
            error.file = error.file or self._path_of(metadata)
            raise
        natives = {name: kind.shape for name, kind in kinds.items()}
        self._sharing = Sharing.of(mapped.partly, natives, mapped.unmatched)
        self._mapped, self.state_dict = mapped, mapped.values

    @staticmethod
    def _path_of(metadata: Metadata | None) -> str | None:
        return metadata.path if isinstance(metadata, StoredMetadata) else None

    def _map_again(self, natives: Shapes) -> list[PartlyUsed]:
        assert self.pairs is not None
        kinds = {name: Kind(tuple(shape), torch.float32) for name, shape in natives.items()}
        mapped = map_state(
            {}, kinds, self.pairs, self.pairs.numbers_in(), self._of_saved, makes_numbers=True
        )
        return mapped.partly

    def _makes_numbers(self) -> bool:
        """Whether a target may want numbers in place of codes."""
        return self.flatten_state_dict and not self.strict_dtype and not self.rebuild

    def _rebuilt(self, metadata: Metadata) -> dict[Any, Any]:
        """A state dict for everything in `metadata`, with new tensors and None for objects."""
        paths = metadata.planner_data or {}
        structure = self._structure
        rank, world_size = world_of(self._rank, self._world_size)
        per_rank = {
            f"{'.'.join(map(str, path))}.": tuple(path)
            for path in (structure["per_rank"] if structure is not None else ())
        }
        values: dict[str, Any] = {}
        own_paths = {fqn: path for fqn, path in paths.items() if fqn != STRUCTURE_FQN}
        for fqn, saved in metadata.state_dict_metadata.items():
            if fqn == STRUCTURE_FQN and isinstance(saved, BytesStorageMetadata):
                continue
            value = self.new_value(fqn, tuple(paths.get(fqn, (fqn,))), saved)
            prefix, _, part = fqn.rpartition(".")
            path = per_rank.get(f"{prefix}.")
            if path is not None and is_rank_part(part):
                values.setdefault(prefix, PerRank())
                own_paths[prefix] = path
                if part == rank_part(rank, world_size):
                    values[prefix].value = value
            else:
                values[fqn] = value
        return rebuild(values, own_paths, structure)

    def new_value(
        self,
        fqn: str,
        path: tuple[Any, ...],
        saved: TensorStorageMetadata | BytesStorageMetadata,
    ) -> Any:
        """What an empty target has for a leaf: a tensor to be filled, None for an object."""
        if isinstance(saved, BytesStorageMetadata):
            return None
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")

    def create_local_plan(self) -> LoadPlan:
        plan = self._plan_under_new_names()
        if self._mapped is not None:
            plan.planner_data = self._sharing
        if self._stored:
            plan.items = [self._under_stored_name(item) for item in plan.items]
        return plan

    def _under_stored_name(self, item: ReadItem) -> ReadItem:
        stored = self._stored.get(item.storage_index.fqn)
        if stored is None:
            return item
        index = dataclasses.replace(item.storage_index, fqn=stored)
        return dataclasses.replace(item, storage_index=index)

    def _plan_under_new_names(self) -> LoadPlan:
        if self.metadata is None:
            raise InvalidArgumentError("set_up_planner was not given the checkpoint's metadata")
        saved = self.metadata.state_dict_metadata
        if self._slots is None:
            return super().create_local_plan()
        self._check_words()
        missing = [fqn for fqn in self.state_dict if fqn not in saved]
        if missing and self._is_old_format():
            return super().create_local_plan()
        with paused_gc():
            if missing:
                self._settle_missing(missing)
            items: list[ReadItem] = []
            mismatches: list[str] = []
            for fqn, value in self.state_dict.items():
                entry = saved.get(fqn)
                if entry is not None:
                    if isinstance(entry, BytesStorageMetadata) and isinstance(value, torch.Tensor):
                        logger.warning(
                            "%s: the target has a tensor, the checkpoint an object, which will "
                            "take its place",
                            fqn,
                        )
                    try:
                        items += read_items(fqn, entry, value)
                    except InvalidArgumentError as error:
                        mismatches.append(str(error))
            if mismatches:
                raise _mismatch(mismatches)
        return LoadPlan(items)

    def _check_words(self) -> None:
        """Of tensors that are made of others: is the target what was saved?"""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        said = (self._structure or {}).get("tensors", {})
        wrong, unsaid = [], []
        for fqn, words in self._words.items():
            if fqn in said:
                try:
                    check_words(fqn, words, said[fqn])
                except InvalidArgumentError as error:
                    wrong.append(str(error))
            elif all(f"{fqn}.{name}" in saved for name in words["inner"]):
                unsaid.append(fqn)
        if wrong:
            raise _mismatch(wrong)
        if unsaid:
            warn(
                f"nothing in the checkpoint says what {_listed(unsaid)} was made of: the inner "
                "tensors of the target are filled by their names"
            )

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

    def _settle_missing(self, missing: list[str]) -> None:
        """Target leaves that the checkpoint has no entries for: settle them, skip them, or raise
        one error that names them."""
        assert self.metadata is not None and self._slots is not None
        saved = self.metadata.state_dict_metadata
        empty = empty_containers(self._structure)
        said = (self._structure or {}).get("tensors", {})
        sizes_of = saved_world_sizes(saved)
        _, world_size = world_of(self._rank, self._world_size)
        tied = {
            identity(value)
            for fqn, value in self.state_dict.items()
            if fqn in saved and isinstance(value, torch.Tensor)
        }
        if self._mapped is not None:
            tied |= set(map(identity, self._mapped.natives))
        lost: list[str] = []
        of_other_worlds: list[str] = []
        hints: dict[str, None] = {}
        for fqn in missing:
            container, key = self._slots[fqn]
            per_rank = isinstance(container, PerRank)
            kind = None if per_rank else empty.get(tuple(self.mappings[fqn]))
            if kind is not None:
                container[key] = new_container(kind)
                continue
            value = self.state_dict[fqn]
            if identity(value) in tied:
                continue  # the same memory is filled under another name
            if fqn in said:
                if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                    continue  # this rank has nothing of it
                of = f"the inner tensors of a {said[fqn]['class']}"
                hints[f" {fqn} was saved as {of}: load into one."] = None
            path = fqn.rpartition(".")[0] if per_rank else fqn
            sizes = sizes_of.get(path)
            if per_rank and sizes:
                of_other_worlds.append(
                    f"{path}: this per-rank value was saved by {sizes[0]} ranks and cannot "
                    f"be loaded by {world_size}; load with as many, or leave it out of the target"
                )
                continue
            lost.append(path)
            if per_rank and path in saved:
                hints[" It was saved as one value for all ranks, not as PerRank."] = None
            elif sizes:
                hints[" It was saved as PerRank; put a PerRank there in the target."] = None
        if of_other_worlds:
            raise _mismatch(of_other_worlds)
        if lost and not self.allow_partial_load:
            keys = "key" if len(lost) == 1 else f"{len(lost)} keys"
            raise MissingKeyError(
                f"Missing {keys} in checkpoint state_dict: {_listed(lost)}.{''.join(hints)}"
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.look([self.say(plan) for plan in global_plan])
        return super().create_global_plan(global_plan)

    def say(self, plan: LoadPlan) -> Any:
        """What rank 0 is to hear of a rank's plan, for `look`."""
        mapped = plan.planner_data if isinstance(plan.planner_data, Sharing) else None
        if self._slots is None or self.metadata is None:
            return _Said(None, mapped)
        asked = {item.storage_index.fqn for item in plan.items}
        return _Said(None if asked >= self.metadata.state_dict_metadata.keys() else asked, mapped)

    def look(self, said: list[Any]) -> None:
        """On rank 0, what all ranks say: log one warning of what the checkpoint has and no rank's
        target, where that is what an earlier model or a fresh optimizer lacks. Raises
        InvalidArgumentError where a mapping leaves elements out, or means no tensor."""
        sharing = [each.sharing for each in said if each.sharing is not None]
        if self.pairs is not None and sharing:
            check_shared(self.pairs, sharing, self._map_again, self._path_of(self.metadata))
        asked = [each.asked for each in said]
        if None not in asked:
            _mention_unasked(self, set().union(*asked))

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for padding in self._mapped.zeros if self._mapped is not None else ():
            padding.zero_()
        plan: LoadPlan = super().finish_plan(new_plan)
        return plan

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
            return dtensor_part(value, index)
        return find_state_dict_object(self.state_dict, index)  # type: ignore[no-any-return]

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.size() == read_item.lengths:
            return tensor
        return super().transform_tensor(read_item, tensor)  # type: ignore[no-any-return]


def _mention_unasked(planner: LoadPlanner, asked: set[str]) -> None:
    """Log one warning of what the checkpoint has and is not among `asked`, where it stands beside
    as much that is in the same container, or below a mapping that is empty in the target. Whoever
    loads a few values of many, or a model without its optimizer, means it."""
    assert planner.metadata is not None
    if asked >= planner.metadata.state_dict_metadata.keys():
        return
    paths = planner.metadata.planner_data or {}
    saved = planner.metadata.state_dict_metadata
    names = planner._stored  # in the checkpoint, where these are others
    used = {
        scale
        for fqn, stored in saved.items()
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype in CODES
        if names.get(fqn, fqn) in asked
        if getattr(planner.state_dict.get(fqn), "dtype", None) not in CODES  # else they stay codes
        for scale in all_scale_names(names.get(fqn, fqn))
    }
    if isinstance(planner.metadata, StoredMetadata):
        used |= planner.metadata.used_by_others
        for name in planner.metadata.numbers.keys() & asked:
            used |= {f"{name}_blocks", f"{name}_scales"}
    beside: dict[tuple[Any, ...], tuple[list[str], list[str]]] = {}  # unasked, asked
    below: list[str] = []
    for fqn, stored in saved.items():
        path = tuple(paths.get(fqn, (fqn,)))
        if fqn == STRUCTURE_FQN or is_rank_part(str(path[-1])):
            continue
        if names.get(fqn, fqn) in used:
            continue
        if isinstance(stored, TensorStorageMetadata) and 0 in stored.size:
            continue  # nothing of it is left out, and no rank asks for a part
        beside_it = beside.setdefault(path[:-1], ([], []))
        is_asked = names.get(fqn, fqn) in asked
        beside_it[is_asked].append(fqn)
        if not is_asked and any(path[:depth] in planner._empty for depth in range(len(path))):
            below.append(fqn)
    unasked = dict.fromkeys(below)
    for left, found in beside.values():
        if found and len(left) <= len(found):
            unasked.update(dict.fromkeys(left))
    if unasked:
        logger.warning(
            "the checkpoint has values that the target has no place for; they are not loaded: %s",
            _listed(list(unasked)),
        )
