"""save and load: stock's calls with our planners, writer and reader."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.calls.futures import running, wait_for, warn
from torch_ckpt.calls.load import Load
from torch_ckpt.calls.save import Save, SavedMetadata, SaveStats, append_to_log
from torch_ckpt.checkpoint.checkpoint import look_again
from torch_ckpt.checkpoint.metadata import encoded
from torch_ckpt.checkpoint.quantization import config_at
from torch_ckpt.checkpoint.selection import Patterns
from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.dcp.read.reader import CheckpointReader, ReplacedError
from torch_ckpt.dcp.write.options import WriterOptions
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.renames import KeyMapping
from torch_ckpt.native.progress import Progress
from torch_ckpt.planning.states import HasState, states_of
from torch_ckpt.ranks import TIMEOUT_S, Ranks
from torch_ckpt.tensor_mapping.mapping import TensorMapping, checked_pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=MutableMapping[str, Any] | HasState)
PathLike = str | os.PathLike[str]


def eager(function: F) -> F:
    """I/O is never traced: torch.compile breaks the graph here."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # Asked at the call: it imports a compiler, and most processes have none.
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function)
        return (disabled or function)(*arguments, **keywords)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # as that marks what it makes
    return call  # type: ignore[return-value]


def one_path(path: PathLike | None, checkpoint_id: PathLike | None) -> PathLike | None:
    """The directory of a call: `checkpoint_id` is stock's name for it."""
    if path is not None and checkpoint_id is not None:
        raise InvalidArgumentError("path and checkpoint_id are the same argument: give one")
    return checkpoint_id if path is None else path


def ranks_of(group: dist.ProcessGroup | None, no_dist: bool, purpose: str = "") -> Ranks:
    return Ranks.alone() if no_dist else Ranks.of(group, purpose)


def make_save(
    path: PathLike | None,
    writer: StorageWriter | None,
    planner: stock_planner.SavePlanner | None,
    ranks: Ranks,
    *,
    use_collectives: bool,
    key_mapping: KeyMapping | None,
    tensor_mapping: TensorMapping | None,
    progress: Progress | None,
    metadata: Mapping[str, Any] | None,
    options: dict[str, Any],
    cancel: threading.Event | None = None,
) -> Save:
    """A save with ours in the places of what is not given; `options` are the writer's."""
    if writer is None:
        if path is None:
            raise InvalidArgumentError("save needs a path or a storage_writer")
        if "save_distributed" not in options:
            options = {"layout": "sharded", **options}
        writer = HuggingFaceStorageWriter(path, **options)
    elif options:
        raise InvalidArgumentError(
            f"{', '.join(options)}: give these to the constructor of the storage_writer"
        )
    if planner is None:
        planner = SavePlanner(
            rank=ranks.rank,
            world_size=ranks.size,
            key_mapping=key_mapping,
            tensor_mapping=tensor_mapping,
        )
    else:
        _check_unmapped(key_mapping, tensor_mapping)
    said = encoded(metadata)
    return Save(
        planner, writer, path, ranks, use_collectives, said, progress=progress, cancel=cancel
    )


def _check_unmapped(key_mapping: Any, tensor_mapping: Any) -> None:
    """Raises InvalidArgumentError for what belongs to a planner that is given."""
    for name, given in (("key_mapping", key_mapping), ("tensor_mapping", tensor_mapping)):
        if given is not None:
            raise InvalidArgumentError(f"{name}: give it to the planner")


def place_of(save: Save) -> str:
    """Where it saves to; where nobody says, the class of its writer, which may be a user's."""
    for place in (getattr(save.writer, "path", None), save.path):
        if place and isinstance(place, str | os.PathLike):
            return os.fsdecode(place)
    return type(save.writer).__name__


def wait_for_saves_beside(world_size: int) -> None:
    """Their writers and directories are not free before, on some ranks earlier than on others."""
    if world_size > 1:
        wait_for(running(), TIMEOUT_S)


@eager
def save(
    state_dict: Mapping[str, Any] | HasState,
    path: PathLike | None = None,
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: stock_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    key_mapping: KeyMapping | None = None,
    tensor_mapping: TensorMapping | None = None,
    progress: Progress | None = None,
    log_path: PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    **writer_options: Unpack[WriterOptions],
) -> SavedMetadata:
    """`torch.distributed.checkpoint.save` with our writer and planner as defaults.

    `state_dict` is a Mapping of names (tensors, objects, and Mappings and lists of these), or what
    has a `state_dict()` that returns one and a `load_state_dict()`: a module, an optimizer. So may
    its entries.

    Without a `storage_writer`, every rank's shards go to directory `path` (stock's name for it is
    `checkpoint_id`); other keywords are those of HuggingFaceStorageWriter: with layout="final" the
    directory is the final one, of whole tensors, for `from_pretrained`. Tensors are stored under
    the names that `key_mapping` makes of theirs, or as `tensor_mapping` says, see SavePlanner.
    `progress` is called about ten times a second, on another thread, with bytes written and bytes
    in all, of all ranks. `log_path` is a file to which each rank appends its SaveStats, a line of
    JSON, also when the save fails; where that cannot be done there is a warning. `metadata`, names
    and values that JSON has, at most 1 MiB as text, is what `open(path).metadata` and `torch-ckpt
    inspect` tell of the checkpoint; rank 0's counts. Raises CheckpointError kinds or OSError,
    naming the rank, on every rank; nothing of a failed save is left, and what stood there before
    still loads. Called from the main thread, it keeps Python's cyclic garbage collector off while
    it plans, but not while it writes. With several ranks it waits for async saves.

    Returns DCP's Metadata, with `stats`, the SaveStats of this rank. Its `storage_data` has by rank
    what each wrote: `written_bytes`, `ring_bytes`, `spill_bytes`, and seconds.
    """
    ranks = ranks_of(process_group, no_dist)
    stats = SaveStats("", ranks.rank, ranks.size, time.time())
    began = time.perf_counter()
    log: str | None = None

    def make() -> Save:
        nonlocal log
        log = None if log_path is None else os.fsdecode(log_path)
        place = one_path(path, checkpoint_id)
        stats.path = "" if place is None else os.fsdecode(place)
        wait_for_saves_beside(ranks.size)
        stats.waited_s = time.perf_counter() - began
        made_save = make_save(
            place,
            storage_writer,
            planner,
            ranks,
            use_collectives=use_collectives,
            key_mapping=key_mapping,
            tensor_mapping=tensor_mapping,
            progress=progress,
            metadata=metadata,
            options=dict(writer_options),
        )
        stats.path = place_of(made_save)
        return made_save

    try:
        # What is wrong with one rank's arguments is an error of all.
        made = ranks.each("save", make)
        saved = SavedMetadata(made.run(lambda: states_of(state_dict)), stats)
    except BaseException as error:
        stats.error = str(error) or type(error).__name__
        raise
    finally:
        stats.total_s = time.perf_counter() - began
        not_logged = append_to_log(log, stats)
        if not_logged is not None:
            warn(not_logged)
    return saved


@overload
def load(
    state_dict: None = None,
    path: PathLike | None = ...,
    *,
    checkpoint_id: PathLike | None = ...,
    storage_reader: StorageReader | None = ...,
    planner: stock_planner.LoadPlanner | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    no_dist: bool = ...,
    key_mapping: KeyMapping | None = ...,
    tensor_mapping: TensorMapping | None = ...,
    format: str | None = ...,
    include: Patterns = ...,
    exclude: Patterns = ...,
    direct_io: bool = ...,
    progress: Progress | None = ...,
) -> dict[str, Any]: ...


@overload
def load(
    state_dict: S,
    path: PathLike | None = ...,
    *,
    checkpoint_id: PathLike | None = ...,
    storage_reader: StorageReader | None = ...,
    planner: stock_planner.LoadPlanner | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    no_dist: bool = ...,
    key_mapping: KeyMapping | None = ...,
    tensor_mapping: TensorMapping | None = ...,
    format: str | None = ...,
    include: Patterns = ...,
    exclude: Patterns = ...,
    direct_io: bool = ...,
    progress: Progress | None = ...,
) -> S: ...


@eager
def load(
    state_dict: MutableMapping[str, Any] | HasState | None = None,
    path: PathLike | None = None,
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: StorageReader | None = None,
    planner: stock_planner.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    key_mapping: KeyMapping | None = None,
    tensor_mapping: TensorMapping | None = None,
    format: str | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    direct_io: bool = True,
    progress: Progress | None = None,
) -> MutableMapping[str, Any] | HasState:
    """`torch.distributed.checkpoint.load` with our reader and planner as defaults.

    Fills `state_dict` in place and returns it: a dict or another mutable Mapping, or what has a
    `state_dict()` and a `load_state_dict()`, as modules and optimizers have; so may its entries,
    which are then given what was loaded. Without one it returns everything that is in the
    checkpoint, nested as it was saved, in new tensors on the CPU. `path` is the directory;
    `checkpoint_id` is stock's name for it.

    `key_mapping`, see SavePlanner, makes names in `state_dict` of those in the checkpoint, or a
    `tensor_mapping` tensors there of others in the checkpoint; numbers that its views name are also
    looked for in a config.json there.
    Where no `storage_reader` is given, `format`, `include` and `exclude` are as CheckpointReader's,
    and `direct_io=False` reads through the page cache. `progress` is as for `save`. Begins again, a
    few times, when another save replaces the checkpoint meanwhile. Raises CheckpointError kinds or
    OSError, naming the rank, on every rank; tensors may then be filled in part.
    """
    ranks = ranks_of(process_group, no_dist)
    rebuilds = state_dict is None
    target: MutableMapping[str, Any] | HasState = {} if state_dict is None else state_dict

    def make() -> Load:
        wait_for_saves_beside(ranks.size)
        place = one_path(path, checkpoint_id)
        reader, own_planner = storage_reader, planner
        if reader is None:
            if place is None:
                raise InvalidArgumentError("load needs a path or a storage_reader")
            reader = CheckpointReader(
                place, format=format, include=include, exclude=exclude, direct_io=direct_io
            )
        elif given := [
            name
            for name, is_given in (
                ("format", format is not None),
                ("include", include is not None),
                ("exclude", exclude is not None),
                ("direct_io", not direct_io),
            )
            if is_given
        ]:
            raise InvalidArgumentError(f"{given[0]}: give it to the storage_reader")
        if own_planner is None:
            pairs = None
            if tensor_mapping is not None:
                where: Any = place or getattr(reader, "path", None) or ""
                pairs = checked_pairs(tensor_mapping, key_mapping).resolved(
                    config_at(os.fsdecode(where))
                )
            own_planner = LoadPlanner(
                rebuild=rebuilds,
                rank=ranks.rank,
                world_size=ranks.size,
                key_mapping=key_mapping,
                tensor_mapping=pairs,
            )
        else:
            _check_unmapped(key_mapping, tensor_mapping)
            if rebuilds:
                raise InvalidArgumentError("a load without a state_dict makes its own planner")
        return Load(own_planner, reader, place, ranks, progress)

    made = ranks.each("load", make)  # what is wrong with one rank's arguments is an error of all
    look_again(lambda: made.run(target), ReplacedError)  # what was read is read again
    return target
