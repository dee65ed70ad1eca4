"""All that a step of a run holds, as one state dict: what a save is given, and what a load wants.

    <fqn>                            the model's tensors, under its own names
    optimizer                        see optimizer_state.py
    scheduler.<n>.<id>               of scheduler n, whose optimizer has the parameters of that id
    dataloader.<r>_of_<n>.rank, .state   of data rank r of n
    rng.<rank>, rng.world_size       random states of each rank
    <name>                           of each of the program's own states

Names other than the model's are told from these by what stands before their first dot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_ckpt.errors import IncompleteError, InvalidArgumentError, warn
from torch_ckpt.planning.flatten import Flat
from torch_ckpt.planning.local_boxes import LocalBoxes
from torch_ckpt.planning.states import has_state
from torch_ckpt.tensor_mapping.mapping import TensorMapping
from torch_ckpt.training.model_state import ModelState, is_extra, listed
from torch_ckpt.training.optimizer_state import OptimizerState
from torch_ckpt.training.rank_state import (
    Reshard,
    needs_reshard,
    part_name,
    random_state,
    restore_random_state,
    saved_size,
    set_random_state,
)
from torch_ckpt.training.step_planner import Path

MODEL, OPTIMIZER, SCHEDULER, DATALOADER, RNG = (
    "model",
    "optimizer",
    "scheduler",
    "dataloader",
    "rng",
)
# What a step may have beside the model and the program's own states.
PARTS = (OPTIMIZER, SCHEDULER, DATALOADER, RNG)
_WORLD_SIZE = "world_size"


class StepState:
    """The state of a program. See Checkpointer for the arguments."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        scheduler: Any,
        dataloader: Any,
        states: Mapping[str, Any] | None,
        *,
        rank: int,
        world_size: int,
        data_rank: tuple[int, int],
        tensor_mapping: TensorMapping | None = None,
    ) -> None:
        self.model = ModelState(model, tensor_mapping)
        self.optimizer = None if optimizer is None else OptimizerState(optimizer)
        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        self.schedulers = [each for each in schedulers if each is not None]
        self.dataloader = dataloader
        self.states = dict(states or {})
        self.rank, self.world_size = rank, world_size
        self.data_rank, self.data_size = data_rank
        for name in self.states:
            if type(name) is not str or not name or "." in name or name in (MODEL, *PARTS):
                raise InvalidArgumentError(
                    f"states: {name!r} is no name for a state: text without a dot, and none of "
                    f"{', '.join((MODEL, *PARTS))}"
                )
        given = [(f"scheduler {number}", each) for number, each in enumerate(self.schedulers)]
        given += [] if dataloader is None else [(DATALOADER, dataloader)]
        for name, value in [*given, *self.states.items()]:
            if not has_state(value):
                raise InvalidArgumentError(
                    f"{name} is a {type(value).__name__}, which has no state_dict and "
                    "load_state_dict"
                )
        if not 0 <= self.data_rank < self.data_size:
            raise InvalidArgumentError(
                f"data_rank is (rank, size); it was ({self.data_rank}, {self.data_size})"
            )

    def parts(self) -> frozenset[str]:
        """The names before the first dot of all that is not the model's."""
        given = {
            OPTIMIZER: self.optimizer is not None,
            SCHEDULER: bool(self.schedulers),
            DATALOADER: self.dataloader is not None,
            RNG: True,
        }
        return frozenset(name for name in given if given[name]) | self.states.keys()

    def scheduler_ids(self, names: Mapping[nn.Parameter, str]) -> list[str]:
        """By what the state of each scheduler is told from those of other ranks: stages of a
        pipeline have optimizers, and so learning rates, of their own."""
        known = {} if self.optimizer is None else self.optimizer.ids(names)
        return [known.get(id(getattr(each, "optimizer", None)), "all") for each in self.schedulers]

    def state_dict(self) -> dict[str, Any]:
        """What is saved. Random states are as before when this returns, whatever others draw to say
        theirs."""
        own = random_state()
        try:
            return self._state_dict({str(self.rank): own, _WORLD_SIZE: self.world_size})
        finally:
            set_random_state(own)

    def _state_dict(self, rng: dict[str, Any]) -> dict[str, Any]:
        state = self.model.stored_state()
        for name in state:
            if name.partition(".")[0] in (*PARTS, *self.states):
                raise InvalidArgumentError(
                    "the model has this name, and it begins as those of a state of the run: give "
                    "the state, or the module, another name",
                    tensor=name,
                )
        names = self.model.parameters()
        state[RNG] = rng
        if self.optimizer is not None:
            state[OPTIMIZER] = self.optimizer.state_dict(names)
        if self.schedulers:
            ids = self.scheduler_ids(names)
            state[SCHEDULER] = {
                str(number): {ids[number]: scheduler.state_dict()}
                for number, scheduler in enumerate(self.schedulers)
            }
        if self.dataloader is not None:
            part = {"rank": self.data_rank, "state": self.dataloader.state_dict()}
            state[DATALOADER] = {part_name(self.data_rank, self.data_size): part}
        for name in sorted(self.states):
            state[name] = self.states[name].state_dict()
        return state

    def load_state_dict(self, state: Any, /) -> None:
        """For the protocol of what has a state: `Wanted` loads."""
        raise NotImplementedError


class _Said(NamedTuple):
    """What rank 0 hears of a rank: names of the step's model that it lacks, and the numbers of its
    schedulers."""

    lacking: set[str]
    schedulers: set[str]


class Wanted:
    """What a load takes of the step at `path`, but for the parts in `exclude`; and then `give`."""

    def __init__(
        self,
        state: StepState,
        path: str,
        parts: Collection[str],
        exclude: Collection[str],
        reshard: Reshard | None,
    ) -> None:
        """`parts`: of the step, by StepState.parts."""
        self._state = state
        self._path = path
        self._parts = frozenset(parts)
        self._taken = state.parts() - frozenset(exclude)
        self._unused = self._parts - state.parts() - frozenset(exclude)
        self._reshard = reshard
        self._model: dict[str, Any] = {}
        self._padding: list[torch.Tensor] = []  # of the model
        self._names: dict[nn.Parameter, str] = {}
        self._held: Any = {}
        self._live: dict[str, Any] = {}  # leaves of the program's own states, by name
        self._lacking: set[str] = set()  # of the model, here
        self._schedulers: set[str] = set()  # that the step has
        self._rng_rank = ""
        self._loaders: list[str] = []  # whose states are read

    def begin(self, leaves: Mapping[str, Path]) -> None:
        state, taken = self._state, self._taken
        lost = taken - self._parts
        if lost:
            raise IncompleteError(
                f"was saved without {listed(lost)}: leave that alone with exclude={sorted(lost)}",
                file=self._path,
            )
        self._model, self._padding = state.model.stored()
        of_model = {fqn for fqn in leaves if fqn.partition(".")[0] not in self._parts}
        missing = self._model.keys() - of_model
        if missing:
            raise IncompleteError(f"lacks what the model has: {listed(missing)}", file=self._path)
        self._lacking = of_model - self._model.keys()
        self._names = state.model.parameters()
        if OPTIMIZER in taken and state.optimizer is not None:
            self._held = state.optimizer.held(self._names)
        self._schedulers = {str(path[1]) for path in leaves.values() if path[0] == SCHEDULER}
        for name in sorted(taken & state.states.keys()):
            own = {name: state.states[name].state_dict()}
            self._live.update(Flat(own, state.rank, state.world_size, slots=True).values)
        ranks = {path[1] for path in leaves.values() if path[0] == RNG and path[1] != _WORLD_SIZE}
        self._rng_rank = str(state.rank if len(ranks) == state.world_size else 0)
        if DATALOADER in taken:
            parts = {str(path[1]) for path in leaves.values() if path[0] == DATALOADER}
            size = saved_size(parts, self._path)
            if self._reshard is not None:
                self._loaders = [part_name(rank, size) for rank in range(size)]
            elif size != state.data_size:
                raise needs_reshard(size, state.data_size, self._path)
            else:
                self._loaders = [part_name(state.data_rank, size)]

    def wants(self, fqn: str, path: Path) -> bool:
        first = fqn.partition(".")[0]
        if first not in self._parts:
            return fqn in self._model
        if first not in self._taken:
            return False
        if first == OPTIMIZER and path[1] == "state":
            return path[2] in self._held
        if first == RNG:
            return path[1] in (self._rng_rank, _WORLD_SIZE)
        return first != DATALOADER or path[1] in self._loaders

    def target(self, fqn: str, path: Path, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        first = fqn.partition(".")[0]
        if first not in self._parts:
            live = self._model[fqn]
            if is_extra(fqn):  # of whatever kind and shape it was
                return torch.empty(shape, dtype=dtype, device="cpu")
            assert isinstance(live, torch.Tensor)
            return live
        if first == OPTIMIZER and path[1] == "state":
            assert self._state.optimizer is not None
            return self._state.optimizer.target(self._held[path[2]], path[3:], dtype, shape)
        live = self._live.get(fqn)
        if isinstance(live, torch.Tensor) and live.shape == shape:
            return torch.empty_like(live, dtype=dtype)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def say(self) -> _Said:
        schedulers = range(len(self._state.schedulers)) if SCHEDULER in self._taken else ()
        return _Said(self._lacking, {str(number) for number in schedulers})

    def look(self, said: list[_Said]) -> None:
        unexpected = set.intersection(*(each.lacking for each in said))
        if unexpected:
            raise InvalidArgumentError(
                f"has what the model lacks on every rank: {listed(unexpected)}", file=self._path
            )
        here = set[str]().union(*(each.schedulers for each in said))
        if SCHEDULER in self._taken and here != self._schedulers:
            raise InvalidArgumentError(
                f"has {len(self._schedulers)} schedulers, and here are {len(here)}",
                file=self._path,
            )
        if self._unused:
            warn(f"{self._path}: nobody takes its {listed(self._unused)}: it is not loaded")

    def give(self, loaded: Mapping[str, Any]) -> None:
        """Hand out what was loaded. Random states last: whatever draws numbers has drawn them."""
        state, taken = self._state, self._taken
        for padding in self._padding:
            padding.zero_()
        # What is mapped was filled where it is.
        own = [name for name, value in self._model.items() if type(value) is not LocalBoxes]
        state.model.take({name: loaded[name] for name in own})
        if OPTIMIZER in taken and state.optimizer is not None:
            state.optimizer.take(self._names, loaded.get(OPTIMIZER, {}))
        if SCHEDULER in taken:
            ids = state.scheduler_ids(self._names)
            for number, scheduler in enumerate(state.schedulers):
                own = self._of_scheduler(number, ids[number], loaded[SCHEDULER][str(number)])
                scheduler.load_state_dict(own)
        for name in sorted(taken & state.states.keys()):
            state.states[name].load_state_dict(loaded.get(name, {}))
        if DATALOADER in taken:
            states = [loaded[DATALOADER][name].get("state", {}) for name in self._loaders]
            own = states[0]
            if self._reshard is not None:
                own = self._reshard(states, state.data_rank, state.data_size)
            state.dataloader.load_state_dict(own)
        if RNG in taken:
            restore_random_state(loaded[RNG], state.rank, state.world_size)

    def _of_scheduler(self, number: int, own: str, states: Mapping[str, Any]) -> Any:
        """The state of a scheduler: that of the same parameters, or of all where they are alike."""
        if own in states:
            return states[own]
        first, *others = states.values()
        if all(other == first for other in others):
            return first
        raise InvalidArgumentError(
            f"scheduler {number} was saved with different states for different parts of the "
            "model, and the parts are others here: leave it alone with exclude=['scheduler']",
            file=self._path,
        )
