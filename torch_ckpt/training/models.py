"""A model by itself: loaded from a Hugging Face directory, or any checkpoint, into any sharding,
and saved as one."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.calls import api
from torch_ckpt.calls.futures import running, wait_for
from torch_ckpt.calls.load import Load
from torch_ckpt.calls.save import SavedMetadata
from torch_ckpt.checkpoint.checkpoint import look_again
from torch_ckpt.checkpoint.quantization import config_at, quantization_of, with_numbers
from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.read.reader import CheckpointReader, ReplacedError
from torch_ckpt.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from torch_ckpt.export.renames import KeyMapping, renamed
from torch_ckpt.native.opened import Listing, OpenedCheckpoint, PartlyUsed, ScaledPair
from torch_ckpt.options import local_path
from torch_ckpt.planning.mapped_state import Kinds, merged
from torch_ckpt.ranks import TIMEOUT_S, Ranks
from torch_ckpt.tensor_mapping.mapping import (
    Named,
    Pairs,
    Shapes,
    Sharing,
    TensorMapping,
    check_shared,
    checked_pairs,
)
from torch_ckpt.training.model_state import ModelState, is_extra, listed, memory_of


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_model` has not loaded.

    missing: names of the model that the checkpoint lacks, on any rank.
    unexpected: names of the checkpoint that the model lacks, on every rank.
    """

    missing: list[str]
    unexpected: list[str]


@dataclasses.dataclass(slots=True)
class _Lacking:
    """What one rank says of a model and a checkpoint."""

    missing: set[str]
    unexpected: set[str]
    common: bool  # whether there is a name that both have
    sharing: Sharing | None  # of a mapping


class _ModelPlanner(LoadPlanner):
    """Fills the tensors of `model` under the names that are not skipped; rank 0 hears what does not
    fit, and decides whether that is an error."""

    def __init__(
        self,
        model: ModelState,
        skip: tuple[str, ...],
        strict: bool,
        path: str,
        key_mapping: KeyMapping | None,
        pairs: Pairs | None,
        ranks: Ranks,
    ) -> None:
        super().__init__(
            allow_partial_load=True, rank=ranks.rank, world_size=ranks.size, key_mapping=key_mapping
        )
        self.model = model.state_dict()
        self._tied = model.tied_names()
        self.skipped = skip
        self._strict = strict
        self._path = path
        self.skipped_stored: set[str] = set()  # that pairs give to what is skipped
        self.report = LoadReport([], [])
        self.readers_pairs = pairs
        # Said by the reader, where there are pairs: it maps, and this planner does not.
        self.sharing: Sharing | None = None
        self.map_again: Callable[[Shapes], list[PartlyUsed]] = lambda _: []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        state_dict.update(
            {name: value for name, value in self.model.items() if not name.startswith(self.skipped)}
        )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        # Two tensors here that are one there.
        ties = {name: of for name, of in self._tied.items() if name not in saved and of in saved}
        entries = {name: saved[of] for name, of in ties.items() if name in state_dict}
        self.metadata = dataclasses.replace(self.metadata, state_dict_metadata={**saved, **entries})
        self._stored.update({name: self._stored.get(of, of) for name, of in ties.items()})

    def say(self, plan: Any) -> Any:
        assert self.metadata is not None
        saved = {
            name
            for name in self.metadata.state_dict_metadata.keys() - self.skipped_stored
            if not name.startswith(self.skipped)
        }
        wanted = self.state_dict.keys()
        # The same memory is filled under another name.
        filled = {memory_of(self.state_dict[name]) for name in saved & wanted}
        # Extra states are no part of a Hugging Face directory.
        missing = {
            name
            for name in wanted - saved
            if memory_of(self.state_dict[name]) not in filled and not is_extra(name)
        }
        return _Lacking(missing, saved - wanted, bool(saved & wanted), self.sharing)

    def look(self, said: list[Any]) -> None:
        missing = set[str]().union(*(each.missing for each in said))
        unexpected = set.intersection(*(each.unexpected for each in said))
        if not any(each.common for each in said):
            raise InvalidArgumentError(
                f"has no name of the model's: the model has {listed(missing)}, this "
                f"{listed(unexpected)}",
                file=self._path,
            )
        if self._strict and missing:
            raise IncompleteError(
                f"lacks what the model has: {listed(missing)}; skip= leaves names alone that begin "
                "so, strict=False all",
                file=self._path,
            )
        if self._strict and unexpected:
            raise InvalidArgumentError(
                f"has what the model lacks: {listed(unexpected)}; skip= leaves names alone that "
                "begin so, strict=False all",
                file=self._path,
            )
        sharing = [each.sharing for each in said if each.sharing is not None]
        if self.readers_pairs is not None and sharing:
            check_shared(self.readers_pairs, sharing, self.map_again, self._path)
        self.report = LoadReport(sorted(missing), sorted(unexpected))


class _ModelReader(CheckpointReader):
    """Reads codes and scales as the numbers that the tensors of `model` are."""

    def __init__(
        self,
        path: str,
        planner: _ModelPlanner,
        key_mapping: KeyMapping | None,
        config: Any,
    ) -> None:
        super().__init__(path)
        self._planner = planner
        self._model = planner.model
        self._key_mapping = key_mapping
        self._config = config

    def _look(self) -> OpenedCheckpoint:
        whole = CheckpointReader._look(self)
        said = quantization_of(whole.path)
        method = None if said is None else said.refused
        pairs = self._planner.readers_pairs
        if pairs is None:
            if method is not None:
                self._check_plain(whole.listing(), method)
            return self._with_numbers(whole, dict)
        skip = self._planner.skipped
        natives: dict[str, Sequence[int]] = {
            name: tuple(value.shape)
            for name, value in self._model.items()
            if isinstance(value, torch.Tensor)
        }
        stored = whole.listing().names
        # Few need it.
        named = functools.cache(lambda: pairs.stored_in([*stored, *_presented(stored)]))
        given = functools.cache(lambda: self._given(pairs, named()))
        opened = self._with_numbers(whole, given)
        numbers = pairs.numbers_in(self._config, config_at(opened.path))
        try:
            found = opened.mapped(pairs.pairs, natives, numbers)
        except InvalidArgumentError:
            if not any(name.startswith(skip) for name in natives):
                raise
            # What is skipped need not be there, whole or at all.
            natives = {name: shape for name, shape in natives.items() if not name.startswith(skip)}
            found = opened.mapped(pairs.pairs, natives, numbers)
        if method is not None:
            self._check_plain(found.opened.listing(), method)
        unmatched = found.unmatched
        if any(map(pairs.is_padding, unmatched)):
            # Scales that are left out may be gone, with what they have scaled.
            unmatched -= {each.pair for each in named() if pairs.is_padding(each.pair)}
        if skip:
            model = pairs.natives_in(list(self._model))
            unmatched -= {each.pair for each in model if each.name.startswith(skip)}
            unmatched -= {each.pair for each in named() if each.other.startswith(skip)}
            others = {each.name for each in named() if not each.other.startswith(skip)}
            self._planner.skipped_stored = {each.name for each in named()} - others
        self._planner.sharing = Sharing.of(found.partly, natives, unmatched)
        self._planner.map_again = lambda all_natives: (
            opened.mapped(pairs.pairs, all_natives, numbers).partly
        )
        return found.opened

    def _given(self, pairs: Pairs, named: Sequence[Named]) -> dict[str, list[str]]:
        """What tensors of the model, that are not skipped, pairs give stored ones to."""
        skip = self._planner.skipped
        of_pair: dict[int, list[str]] = {}
        for each in pairs.natives_in(list(self._model)):
            if not each.name.startswith(skip):
                of_pair.setdefault(each.pair, []).append(each.name)
        given: dict[str, list[str]] = {}
        for each in named:
            natives = of_pair.get(each.pair, [])
            if each.other:
                natives = [each.other] if each.other in natives else []
            if natives:
                given.setdefault(each.name, []).extend(natives)
        return given

    def _with_numbers(
        self, opened: OpenedCheckpoint, given_of: Callable[[], Mapping[str, Sequence[str]]]
    ) -> OpenedCheckpoint:
        """given_of: see `_given`."""
        listing = opened.listing()
        skip = self._planner.skipped
        names = renamed(self._key_mapping, [*listing.names, *_presented(listing.names)])
        model = self._model

        def is_number(pair: ScaledPair) -> bool:
            # What has its scales itself, or is no float, takes codes as they are.
            given = given_of()
            if pair.codes in given or pair.name in given:
                natives = [*given.get(pair.codes, ()), *given.get(pair.name, ())]
                if not any(_is_float(model[name]) for name in natives):
                    return False
                if pair.scales in given:
                    raise UnsupportedError(
                        f"is codes, which become numbers in '{natives[0]}', and pairs of "
                        f"tensor_mapping give their scales '{pair.scales}' to "
                        f"'{given[pair.scales][0]}' as well: leave the scales out",
                        file=opened.path,
                        tensor=pair.codes,
                    )
                return True
            name = names.get(pair.codes, pair.codes)
            if skip and name.startswith(skip):
                return False
            return names.get(pair.scales, pair.scales) not in model and _is_float(model.get(name))

        return with_numbers(
            opened,
            is_number,
            needed=lambda pair: (
                is_number(pair)
                and (
                    names.get(pair.name, pair.name) in model
                    or not given_of().keys().isdisjoint((pair.name, pair.codes))
                )
            ),
            kept=[name for name in listing.names if names.get(name, name) in model],
        )

    def _check_plain(self, listing: Listing, method: str) -> None:
        """Raises UnsupportedError for a float of the model that is stored as codes: under its name,
        or under names beside it that the model lacks."""
        types = listing.tensors()
        names = renamed(self._key_mapping, list(types))
        stored = {names.get(name, name): each for name, each in types.items()}
        beside = {name.rpartition(".")[0] for name in stored if name not in self._model}
        for name, value in self._model.items():
            if not isinstance(value, torch.Tensor) or not _is_float(value):
                continue
            if name.startswith(self._planner.skipped):
                continue
            is_there = name in stored
            if is_there and stored[name].dtype in _FLOATS:
                continue
            # What nothing is stored beside is missing, or tied; what is mapped is there once it is.
            if not is_there and beside.isdisjoint((name, name.rpartition(".")[0])):
                continue
            how = f"{stored[name].dtype} of shape {stored[name].shape}" if is_there else "codes"
            raise UnsupportedError(
                f"is stored as {how}, by {method} as config.json says, and the model has "
                f"{value.dtype} of shape {tuple(value.shape)}: such codes are not made numbers",
                file=os.fspath(self.path),
                tensor=name,
            )

    @property
    def has_numbers(self) -> bool:
        """Whether codes are read as numbers."""
        return bool(self._list().scaled)


_FLOATS = ("F64", "F32", "F16", "BF16")


def _presented(names: Sequence[str]) -> list[str]:
    """What MXFP4 is called when it is numbers."""
    return [name.removesuffix("_blocks") for name in names if name.endswith("_blocks")]


def _is_float(value: Any) -> bool:
    """Whether a tensor has floats of 16 bits or more; what is none is not asked for here."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.is_floating_point() and value.dtype.itemsize > 1


def load_model(
    model: nn.Module | Sequence[nn.Module],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    skip: str | Sequence[str] = (),
    key_mapping: KeyMapping | None = None,
    tensor_mapping: TensorMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill `model`, a module or the parts of one that this rank has, from the checkpoint at `path`:
    a directory of Hugging Face's, or what else `torch_ckpt.open` reads. Each rank reads what it
    holds; names are without what DDP, torch.compile and activation wrappers add.

    strict: names that the model or the checkpoint lacks are an error; else they are in what is
        returned.
    skip: names that begin so stay as they are.
    key_mapping: from names in the checkpoint to those in the model, as `torch_ckpt.load`'s.
    tensor_mapping: which elements of the checkpoint are which of the model: pairs (stored view,
        native view), as ("experts.{e}.up", "up[{e}].T"), the name of a table of torch_ckpt's, a
        path of a JSON file, or what one holds: docs/tensor_mapping.md. Every element of both is in
        one pair, or it is an error, before anything is read. What no pair names keeps its name.
    process_group: the ranks that load together; the default one if None.

    Codes with scales (float8, MXFP4) are read as the numbers that they are, rounded once, where the
    model has floats of 16 bits or more; its `config` then has no `quantization_config` any more. A
    model that has codes and scales itself gets these; under a `tensor_mapping`, where pairs map the
    scales. A tied tensor may be there under any of its names. Raises UnsupportedError for codes of
    another kind, IncompleteError for missing names and files, InvalidArgumentError for unexpected
    names, for other shapes, and where there is no common name; naming them, on all ranks.
    """
    ranks = Ranks.of(process_group)

    def make() -> tuple[ModelState, _ModelPlanner, _ModelReader, str]:
        wait_for(running(), TIMEOUT_S)
        pairs = None
        if tensor_mapping is not None:
            pairs = checked_pairs(tensor_mapping, key_mapping)
        place = local_path(path)
        prefixes = (skip,) if isinstance(skip, str) else tuple(skip)
        if not all(type(prefix) is str and prefix for prefix in prefixes):
            raise InvalidArgumentError(f"skip is a list of prefixes of names; it was {skip!r}")
        state = ModelState(model)
        planner = _ModelPlanner(state, prefixes, strict, place, key_mapping, pairs, ranks)
        reader = _ModelReader(place, planner, key_mapping, state.config)
        return state, planner, reader, place

    state, planner, reader, place = ranks.each("load_model", make)
    load = Load(planner, reader, place, ranks)
    look_again(lambda: load.run({}), ReplacedError)
    filled = planner.original_state_dict

    def take() -> None:
        state.take(filled)
        if reader.has_numbers:
            state.forget_quantization()

    ranks.gather("state of a model", take, lambda _: None)
    return ranks.decide("report of load_model", lambda: planner.report)


class _Stored:
    """A model's state as it is stored, which `save` asks for on all ranks together."""

    def __init__(self, model: ModelState) -> None:
        self.state_dict = model.stored_state
        self.load_state_dict = model.load_state_dict


def save_model(
    model: nn.Module | Sequence[nn.Module],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    extras: Any = None,
    tensor_mapping: TensorMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SavedMetadata:
    """Save `model`, a module or the parts of one that this rank has, as a Hugging Face directory at
    `path`: its tensors under its own names, in `dtype` where they are floats, its configuration,
    and `extras`; of a PEFT model the adapter alone. As the model's part of a step of a
    Checkpointer. The ranks of `process_group`, or of the default one, call it together.

    tensor_mapping: as that of `load_model`, the other way: the stored tensors that pairs name are
        written, from where their elements are in the model, in the smallest shapes that have these.

    Raises what `torch_ckpt.save` does, UnsupportedError for what cannot be saved by name, and
    InvalidArgumentError for what is no mapping.
    """
    made: list[ModelState] = []

    def make() -> Kinds:
        made.append(ModelState(model, tensor_mapping))
        return made[0].own_kinds()

    kinds = Ranks.of(process_group).gather("save_model", make, merged)
    (state,) = made
    state.kinds = kinds
    return api.save(
        _Stored(state),
        path,
        layout="final",
        naming=state.naming,
        dtype=dtype,
        extras=state.beside(extras),
        process_group=process_group,
    )
