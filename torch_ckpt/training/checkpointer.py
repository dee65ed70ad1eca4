"""Checkpointer: a training run that goes on after a kill, on as many ranks or others."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch.distributed as dist
from torch import nn

from torch_ckpt.calls.futures import AsyncSave, RunningSave, running, wait_for
from torch_ckpt.calls.load import Load
from torch_ckpt.checkpoint.checkpoint import Checkpoint, look_again
from torch_ckpt.dcp.read.reader import CheckpointReader, ReplacedError
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.write.layouts import MOST_BYTES, Layout, Layouts
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import IncompleteError, InvalidArgumentError
from torch_ckpt.options import integer
from torch_ckpt.planning.mapped_state import Kinds, merged
from torch_ckpt.ranks import TIMEOUT_S, Ranks, rank_and_size
from torch_ckpt.runs.directory import CheckpointDirectory
from torch_ckpt.tensor_mapping.mapping import TensorMapping
from torch_ckpt.training.model_state import listed
from torch_ckpt.training.rank_state import Reshard
from torch_ckpt.training.step_planner import StepPlanner
from torch_ckpt.training.step_state import DATALOADER, MODEL, PARTS, StepState, Wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PARTS = "parts"  # in the metadata of a step: what its names begin with that are not the model's


class _Alike(NamedTuple):
    """What all ranks of a Checkpointer have in common, and which part of the data a rank has."""

    parts: frozenset[str]
    data_size: int
    naming: str
    data_rank: int
    kinds: Kinds  # of its model's tensors, where these are mapped


def _check_alike(of_ranks: list[_Alike]) -> Kinds:
    """Returns the kinds of all parts of the model."""
    first = of_ranks[0]
    for rank, own in enumerate(of_ranks):
        if own[:3] != first[:3]:
            raise InvalidArgumentError(
                f"rank 0 has the parts {sorted(first.parts)}, {first.data_size} data ranks and "
                f"a model of {first.naming}, rank {rank} has {sorted(own.parts)}, {own.data_size} "
                f"and {own.naming}: all ranks give the same",
                rank=rank,
            )
    missing = set(range(first.data_size)) - {own.data_rank for own in of_ranks}
    if DATALOADER in first.parts and missing:
        raise InvalidArgumentError(f"data_rank: nobody is data rank {min(missing)}")
    return merged([own.kinds for own in of_ranks]) if any(own.kinds for own in of_ranks) else {}


class DirectoryOptions(TypedDict, total=False):
    """The keywords of CheckpointDirectory, for editors and type checkers."""

    keep_last: int | None
    keep_every: int | None
    best: str | None
    best_mode: Literal["min", "max"]
    process_group: dist.ProcessGroup | None


class Checkpointer:
    """Saves and loads all that a training run needs to go on, below the directory `root`.

        checkpointer = torch_ckpt.Checkpointer("runs/a", model, optimizer, keep_last=3)
        for step in range(checkpointer.load() + 1, steps + 1):
            train(step)
            if step % 500 == 0:
                checkpointer.save(step)
        checkpointer.close()

    root/step-<n>/model is a Hugging Face directory: the model's tensors under its own names, its
    configuration, and `extras`; of a PEFT model the adapter alone. root/step-<n>/state has all
    else. Both come with one commit.

    model: a module, or a list of those that this rank has (pipeline stages). What DDP,
        torch.compile and activation wrappers add to names is left out; FSDP2 and tensor parallelism
        leave theirs as they are.
    optimizer: one or a list, of any class: state is kept by the names of parameters.
    scheduler: one or a list. dataloader: what has a state_dict and a load_state_dict.
    states: by name, anything else that has these two.
    extras: what stands beside the model, as HuggingFaceStorageWriter's; its own configuration,
        generation configuration and code come by themselves.
    background: whether `save` returns when the state is copied, and the rest goes on beside
        training.
    data_rank: (rank, size) of this rank's loader among those that have different data; this rank
        among all if None. Ranks that share a loader say the same.
    tensor_mapping: as load_model's and save_model's: how the model's tensors are stored in each
        step, where that is not as they are. Optimizer state stays under the model's names.
    directory: keywords of CheckpointDirectory.

    All ranks make the same calls in the same order. A context manager, which closes. Raises
    CheckpointError kinds and OSError, on all ranks.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        extras: Any = None,
        background: bool = True,
        data_rank: tuple[int, int] | None = None,
        tensor_mapping: TensorMapping | None = None,
        **directory: Unpack[DirectoryOptions],
    ) -> None:
        self._group = directory.get("process_group")
        rank, size = rank_and_size(self._group)
        ranks = Ranks.of(self._group)
        made: list[StepState] = []

        def make() -> _Alike:
            state = StepState(
                model,
                optimizer,
                scheduler,
                dataloader,
                states,
                rank=rank,
                world_size=size,
                data_rank=(rank, size) if data_rank is None else data_rank,
                tensor_mapping=tensor_mapping,
            )
            made.append(state)
            return _Alike(
                state.parts(),
                state.data_size,
                state.model.naming,
                state.data_rank,
                state.model.own_kinds(),
            )

        kinds = ranks.gather("Checkpointer", make, _check_alike)
        (self._state,) = made
        self._state.model.kinds = kinds
        self._extras = extras
        self._background = background
        self._stager = PinnedMemoryStager()
        self._last: AsyncSave | None = None
        self.directory = CheckpointDirectory(root, **directory)

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> AsyncSave:
        """Save the run after `step` as root/step-<step>; one that is there is replaced. The model
        and all else may change when this returns; in the background, what is copied is written.

        metrics: numbers by name, of which `best` of the directory says which counts.

        Returns an AsyncSave; without `background` one that is done. Raises what torch_ckpt.save
        does; an error in the background is raised by its `result()`, the next call, or `close`.
        """
        options: dict[str, Any] = {
            "storage_writer": self._writer(),
            "metadata": {_PARTS: sorted(self._state.parts())},
            "metrics": metrics,
        }
        if self._background:
            self._last = self.directory.async_save(
                self._state, step, async_stager=self._stager, **options
            )
            return self._last
        saved = self.directory.save(self._state, step, **options)
        total = saved.stats.total_s
        over = RunningSave(saved.stats)
        over.finish(saved, None)
        saved.stats.total_s = total
        self._last = over.future
        return self._last

    def _writer(self) -> HuggingFaceStorageWriter:
        model = self._state.model
        extras = model.beside(self._extras)
        final = Layout(True, MODEL, model.naming, MOST_BYTES, extras=extras)
        writer = HuggingFaceStorageWriter(self.directory.root, layout="final")
        writer.layouts = Layouts(final, Layout(False, "state"), self._state.parts())
        return writer

    def wait_for_staging(self) -> None:
        """Wait until the last save has what it saves, which is so when `save` has returned: for
        loops that were written for checkpointers of another kind. Raises what the copy has
        raised."""
        if self._last is not None:
            self._last.staging_completion.result()

    def load(
        self,
        step: int | Literal["best"] | None = None,
        *,
        exclude: Collection[str] = (),
        reshard: Reshard | None = None,
    ) -> int:
        """Go on from a step: the newest that is committed, "best", or a number. Returns it; 0 where
        there is none yet. On as many ranks as saved it the next losses are the same to the bit.

        exclude: parts that are left alone: names of `states`, "optimizer", "scheduler",
            "dataloader", "rng".
        reshard: for a loader that another number of data ranks has saved: f(states, rank, size),
            with the states of all of them, gives this rank's.

        With another number of ranks random states begin anew, with a warning. Raises
        IncompleteError for what the step lacks, InvalidArgumentError for what does not fit, naming
        it, on all ranks.
        """
        ranks = Ranks.of(self._group)
        wanted: list[Wanted] = []
        loaded: dict[str, Any] = {}
        left: frozenset[str] = frozenset()

        def check() -> tuple[Any, ...]:
            nonlocal left
            wait_for(running(), TIMEOUT_S)  # or a step may come to be, or go, meanwhile
            left = self._checked(exclude)
            return step, tuple(sorted(left)), reshard is None

        def once() -> int:
            found = ranks.gather("step to load", check, self._named)
            if found is None:
                return 0
            number, name, parts = found
            path = os.path.join(self.directory.root, name)
            own = Wanted(self._state, path, parts, left, reshard)
            wanted[:] = [own]
            loaded.clear()
            planner = StepPlanner(own, rank=ranks.rank, world_size=ranks.size)
            Load(planner, CheckpointReader(path), path, ranks).run(loaded)
            return number

        number = look_again(once, ReplacedError)
        if wanted:
            ranks.gather("states of a step", lambda: wanted[0].give(loaded), lambda _: None)
        return number

    def _checked(self, exclude: Collection[str]) -> frozenset[str]:
        names = frozenset([exclude] if isinstance(exclude, str) else exclude)
        known = {*PARTS, *self._state.parts()}
        if names - known:
            raise InvalidArgumentError(
                f"exclude: {listed(set(map(repr, names - known)))} is no part that is left alone; "
                f"these are: {listed(known)}"
            )
        return names

    def _named(self, asked: list[tuple[Any, ...]]) -> tuple[int, str, list[str]] | None:
        """On rank 0: number and name of a step, and its parts."""
        for rank, own in enumerate(asked):
            if own != asked[0]:
                raise InvalidArgumentError(
                    f"rank 0 loads step {asked[0][0]} without {list(asked[0][1])}, rank {rank} "
                    f"step {own[0]} without {list(own[1])}, or one has a reshard",
                    rank=rank,
                )
        step = asked[0][0]
        number = None if isinstance(step, str | None) else integer(step)
        if step == "best":
            path = self.directory.best()
            if path is None:
                raise IncompleteError("has no best checkpoint", file=self.directory.root)
        elif step is None:
            path = self.directory.latest()
            if path is None:
                return None
        elif number is not None:
            path = self.directory.path(number)
        else:
            raise InvalidArgumentError(f'step is a number, "best" or None; it was {step!r}')
        said = Checkpoint(path).metadata
        parts = said.get(_PARTS)
        if not isinstance(parts, list) or type(said.get("step")) is not int:
            raise InvalidArgumentError(
                "was not saved by a Checkpointer; torch_ckpt.load loads it", file=path
            )
        return said["step"], os.path.basename(path), parts

    def close(self) -> None:
        """Wait for the saves and deletions that go on. May be called twice. Raises the error of a
        save that nobody has heard of."""
        self.directory.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
