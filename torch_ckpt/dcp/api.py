"""save, async_save, load: stock's calls with our planners, writer and reader, and clean-up."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.checkpoint import look_again
from torch_ckpt.dcp.async_saves import (
    AsyncSave,
    OnBusy,
    OnFailure,
    SaveStats,
    begin,
    running,
    wait_for,
)
from torch_ckpt.dcp.daemon import prepare
from torch_ckpt.dcp.one_save import OneSaveStager
from torch_ckpt.dcp.planner import LoadPlanner, SavePlanner
from torch_ckpt.dcp.planning import paused_while_trainer_waits, rank_and_size
from torch_ckpt.dcp.reader import HuggingFaceStorageReader, ReplacedError
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.whole_state import Unwrapping, whole_state, without_statefuls
from torch_ckpt.dcp.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import CancelledError, CheckpointError, InvalidArgumentError, with_rank
from torch_ckpt.key_mapping import KeyMapping
from torch_ckpt.options import check_choice, local_path

# Single-process use is intended where no process group was made. In an async save stock says it in
# a thread, which no filter for a block of code reaches.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_PathLike = str | os.PathLike[str]
_OURS = (HuggingFaceStorageWriter, type(None))
_WRITER_OPTIONS = inspect.signature(HuggingFaceStorageWriter).parameters.keys() - {"path"}


def _eager(function: F) -> F:
    """I/O is never traced: torch.compile breaks the graph here."""
    disabled: F = torch.compiler.disable(function)
    return disabled


def _one_path(path: _PathLike | None, checkpoint_id: _PathLike | None) -> _PathLike | None:
    """The directory of a call: `checkpoint_id` is stock's name for it."""
    if path is not None and checkpoint_id is not None:
        raise InvalidArgumentError("path and checkpoint_id are the same argument: give one")
    return checkpoint_id if path is None else path


def _writer(
    writer: Any,
    checkpoint_id: _PathLike | None,
    rank: int,
    world_size: int,
    options: dict[str, Any],
) -> Any:
    if writer is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("save needs a path or a storage_writer")
        if "save_distributed" not in options:
            options = {"layout": "sharded", **options}
        writer = HuggingFaceStorageWriter(checkpoint_id, **options)
    elif options:
        raise InvalidArgumentError(
            f"{', '.join(options)}: of a storage_writer that is given, say so to its constructor"
        )
    if isinstance(writer, HuggingFaceStorageWriter):
        writer.reset(checkpoint_id)
        writer._begin_save(rank, world_size)
    return writer


def _planner(
    planner: stock_planner.SavePlanner | None,
    writer: Any,
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    key_mapping: KeyMapping | None,
) -> stock_planner.SavePlanner:
    if planner is None:
        planner = SavePlanner(rank=rank, world_size=world_size, key_mapping=key_mapping)
    elif key_mapping is not None:
        raise InvalidArgumentError("key_mapping: of a planner that is given, say so to it")
    if isinstance(planner, SavePlanner):
        # DCP does not tell it either.
        alone = world_size == 1
        planner._group = (rank,) if alone else tuple(dist.get_process_group_ranks(group))
        final = isinstance(writer, HuggingFaceStorageWriter) and not writer.save_distributed
        planner._stored_names = writer.mapped_names() if final else None
    return planner


_MetadataErrors = Callable[[], list[Exception | None]]


def _first_failure(
    error: CheckpointException, metadata_errors: _MetadataErrors | None
) -> BaseException:
    """The failure of the lowest rank that has one of its own, as itself, so that `except Exception`
    catches it (it does not catch a CheckpointException) and its kind, errno and file are there."""
    # Ranks that were cancelled were so because of another's failure.
    failures = error.failures
    rank = min(failures, key=lambda rank: (isinstance(failures[rank][0], CancelledError), rank))
    cause: BaseException = error.failures[rank][0]
    if isinstance(cause, AssertionError):
        # DCP reports an error of read_metadata as the text of an AssertionError. All ranks have
        # the same failures, so that all are here.
        known = metadata_errors()[rank] if metadata_errors is not None else None
        cause = known or CheckpointError(str(cause), rank=rank)
    return with_rank(cause, rank)


def _checked(call: Callable[[], T], metadata_errors: _MetadataErrors | None = None) -> T:
    try:
        with warnings.catch_warnings():
            # As above, whatever the caller has made of the filters since.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return call()
    except CheckpointException as error:
        raise _first_failure(error, metadata_errors) from error


def _wait_for_async_saves(world_size: int) -> None:
    """Their collectives would mix with ours."""
    if world_size > 1:
        wait_for(running(), 600.0)


@_eager
def save(
    state_dict: dict[str, Any],
    path: _PathLike | None = None,
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: stock_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    key_mapping: KeyMapping | None = None,
    **writer_options: Any,
) -> Metadata:
    """`torch.distributed.checkpoint.save` with our writer and planner as defaults.

    Without a `storage_writer`, every rank's shards go to directory `path` (stock's name for it is
    `checkpoint_id`); other keywords
    are those of HuggingFaceStorageWriter: with layout="final" the directory is the final one, of
    whole tensors, for `from_pretrained`. Tensors are stored under the names that `key_mapping`, see
    SavePlanner, makes of theirs. Raises CheckpointError kinds or OSError, naming the rank, on every
    rank; nothing of a failed save is left, and what stood there before still loads. Called from the
    main thread, it keeps Python's cyclic garbage collector off until it returns. With several ranks
    it waits for async saves.

    Returns DCP's metadata, whose `storage_data` has by rank what it did: `written_bytes`,
    `ring_bytes`, `parts_bytes`, and seconds (see SaveStats).
    """
    checkpoint_id = _one_path(path, checkpoint_id)
    rank, world_size = rank_and_size(process_group, no_dist)
    _wait_for_async_saves(world_size)
    refusal: Exception | None = None
    writer: Any = None
    try:
        writer = _writer(storage_writer, checkpoint_id, rank, world_size, writer_options)
        planner = _planner(planner, writer, process_group, rank, world_size, key_mapping)
        state_dict = without_statefuls(state_dict)
    except Exception as error:
        if world_size == 1 or not use_collectives:
            _end(writer, planner)
            raise
        # The other ranks hear of it where the planner says so; until then this one does what they
        # do.
        state_dict, refusal = {}, error
        writer = writer or HuggingFaceStorageWriter(checkpoint_id or os.curdir)
        planner = planner or SavePlanner(rank=rank, world_size=world_size)
    try:
        # Planning makes some twenty objects per tensor, with stock's planner a hundred; collecting
        # between them takes longer than making them.
        with paused_while_trainer_waits(keeps=False), Unwrapping(planner):
            try:
                metadata: Metadata = _checked(
                    lambda: state_dict_saver.save(
                        whole_state(state_dict, refusal),
                        checkpoint_id=checkpoint_id,
                        storage_writer=writer,
                        planner=planner,
                        process_group=process_group,
                        no_dist=no_dist or world_size == 1,  # nothing to send to oneself
                        use_collectives=use_collectives,
                    )
                )
            except Exception as error:
                if refusal is None or isinstance(error, CheckpointError | OSError):
                    raise
                raise refusal from error  # other ranks are gone, so that they do not hear of it
        return metadata
    finally:
        _end(writer, planner)


@_eager
def async_save(
    state_dict: dict[str, Any],
    path: _PathLike | None = None,
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: stock_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_busy: OnBusy = "wait",
    on_failure: OnFailure = "raise",
    on_commit: Callable[[], None] | None = None,
    log_path: _PathLike | None = None,
    timeout: float = 600.0,
    key_mapping: KeyMapping | None = None,
    **options: Any,
) -> AsyncSave:
    """`torch.distributed.checkpoint.async_save` with our writer, planner and stager as defaults.

    Returns an AsyncSave, a future, when the tensors may change. With a stager that stages beside
    the trainer (`use_async_staging`) it returns before: the tensors may change when the
    `staging_completion` of the AsyncSave is done.

    The save goes on with collectives in a thread of its own. A trainer that uses the same process
    group meanwhile gives it another one: `process_group=dist.new_group(backend="gloo")`.

    on_busy: what to do while an earlier async save of this process is not over. "wait" for it,
        "raise" ConflictError, or "overlap": stage now, and save when it is over. Saves that would
        share a writer, a planner or a stager that is not ours wait all the same.
    on_failure: "raise" raises errors from this call, or from the future; one that nobody has asked
        the future for, from the next call (with several ranks, if it is one of rank 0, as those of
        saves are; what fails on another rank alone is a warning there). "warn" makes warnings of
        them, for trainers that shall go on whatever happens; the future's result is None then.
    on_commit: called on every rank, in the background, when the checkpoint is committed and before
        the future is done. What it raises is the save's error. It must not save or load itself,
        which would wait for this save.
    log_path: a file to which each rank appends its SaveStats, a line of JSON a save.
    timeout: seconds to wait for earlier saves, and besides for rank 0, which says for all whether
        the save begins.
    key_mapping: as for `save`. A function is called in the background, or in another process.
    options: keywords of HuggingFaceStorageWriter, as for `save`; others go to stock's, which may
        get more in later versions.

    Raises what `save` would: on this rank what goes wrong before and while it stages, and from the
    futures of all ranks that and all else. Besides, CheckpointError where an earlier save failed
    and nobody has heard of it, and ConflictError for `on_busy`.
    """
    checkpoint_id = _one_path(path, checkpoint_id)
    check_choice("on_busy", on_busy, get_args(OnBusy))
    check_choice("on_failure", on_failure, get_args(OnFailure))
    rank, world_size = rank_and_size(process_group, no_dist)
    if checkpoint_id is not None and isinstance(storage_writer, _OURS):
        checkpoint_id = local_path(checkpoint_id)  # the save goes on in another directory
    place = checkpoint_id or getattr(storage_writer, "path", None) or type(storage_writer).__name__
    where = os.fsdecode(place)
    log = None if log_path is None else os.fsdecode(os.path.abspath(log_path))
    save = AsyncSave(SaveStats(where, rank, world_size, time.time()), on_failure, log)
    crosses = async_checkpointer_type is AsyncCheckpointerType.PROCESS
    writer: Any = None
    one: OneSaveStager | None = None

    def conclude(metadata: Any, error: BaseException | None) -> None:
        """The save is over. Once more is fine."""
        try:
            if one is not None:
                one.end()
            _end(writer, planner)
            if error is None:
                save.count(metadata)
                if on_commit is not None:
                    on_commit()
        except BaseException as failure:  # or nobody would ever hear
            error = error or failure
        if not isinstance(error, Exception | None):
            error = _named(error, save)  # who waits for the future was not interrupted
        save.finish(metadata if error is None else None, error)

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        conclude(None if error is not None else done.result(), _named(error, save))

    try:
        # What two saves cannot use at a time.
        own_memory = isinstance(async_stager, PinnedMemoryStager | type(None))
        shared = [storage_writer, planner, None if own_memory else async_stager]
        turn = begin(save, process_group, on_busy, shared, timeout)
        if crosses:
            prepare(process_group, turn, timeout)
        writer_options = {name: options.pop(name) for name in _WRITER_OPTIONS & options.keys()}
        writer = _writer(storage_writer, checkpoint_id, rank, world_size, writer_options)
        planner = _planner(planner, writer, process_group, rank, world_size, key_mapping)
        stager = async_stager
        if stager is None and isinstance(writer, AsyncStager):
            stager = writer  # as stock does it
        if stager is None:
            stager = PinnedMemoryStager()
        one = OneSaveStager(
            state_dict,
            stager,
            writer,
            planner,
            save,
            turn,
            crosses=crosses,
        )
        answer = _checked(
            lambda: state_dict_saver.async_save(
                {},  # `one` has the state
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                async_checkpointer_type=async_checkpointer_type,
                async_stager=one,
                no_dist=no_dist or world_size == 1,  # nothing to send to oneself
                use_collectives=use_collectives,
                **options,
            )
        )
        assert isinstance(answer, AsyncSaveResponse)  # since `one` gave it a future
        answer.upload_completion.add_done_callback(settle)
        one.after_execute()
    except BaseException as error:
        # Ctrl-C may come at any line. If stock's thread has the state already, it goes on.
        if one is None or one.give_up(error):
            conclude(None, error)
            if on_failure == "warn" and isinstance(error, Exception):
                return save
            save.told()
        raise
    if one.error is not None and (on_failure == "raise" or not isinstance(one.error, Exception)):
        save.told()
        raise one.error
    return save


def _named(error: BaseException | None, save: AsyncSave) -> BaseException | None:
    """What a save in the background failed with, as `save` would raise it."""
    if isinstance(error, CheckpointException):
        first = _first_failure(error, None)
        first.__cause__ = error
        return first
    if error is None or isinstance(error, CheckpointError | OSError):
        return error
    # Of the thread or the process itself: it does not say what it was doing.
    text = f"{type(error).__name__}: {error}"
    named = CheckpointError(text, file=save.stats.path, rank=save.stats.rank)
    named.__cause__ = error
    return named


@_eager
def load(
    state_dict: dict[str, Any] | None = None,
    path: _PathLike | None = None,
    *,
    checkpoint_id: _PathLike | None = None,
    storage_reader: StorageReader | None = None,
    planner: stock_planner.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    key_mapping: KeyMapping | None = None,
    direct_io: bool = True,
) -> dict[str, Any]:
    """`torch.distributed.checkpoint.load` with our reader and planner as defaults.

    Fills `state_dict` in place and returns it. Without one it returns everything that is in the
    checkpoint, nested as it was saved, in new tensors on the CPU. `path` is the directory;
    `checkpoint_id` is stock's name for it.

    `key_mapping`, see SavePlanner, makes names in `state_dict` of those in the checkpoint.
    `direct_io=False` reads through the page cache, where no `storage_reader` is given. Begins
    again, a few times, when another save replaces the checkpoint meanwhile. Raises CheckpointError
    kinds or OSError, naming the rank, on every rank; tensors may then be filled in part.
    """
    checkpoint_id = _one_path(path, checkpoint_id)
    rebuilds = state_dict is None
    state_dict = {} if state_dict is None else state_dict
    if storage_reader is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("load needs a path or a storage_reader")
        storage_reader = HuggingFaceStorageReader(checkpoint_id, direct_io=direct_io)
    elif not direct_io:
        raise InvalidArgumentError("direct_io: of a reader that is given, say so to it")
    reader = storage_reader
    rank, world_size = rank_and_size(process_group, no_dist)
    _wait_for_async_saves(world_size)
    if planner is None:
        planner = LoadPlanner(
            rebuild=rebuilds, rank=rank, world_size=world_size, key_mapping=key_mapping
        )
    elif key_mapping is not None:
        raise InvalidArgumentError("key_mapping: of a planner that is given, say so to it")
    elif rebuilds:
        raise InvalidArgumentError("a load without a state_dict makes its own planner")
    fill = not state_dict and isinstance(planner, LoadPlanner) and planner.rebuild

    def metadata_errors() -> list[Exception | None]:
        """What read_metadata raised, by rank. A collective call."""
        errors: list[Exception | None] = [getattr(reader, "metadata_error", None)] * world_size
        if world_size > 1:
            dist.all_gather_object(errors, errors[rank], group=process_group)
        return errors

    def once() -> None:
        _checked(
            lambda: state_dict_loader.load(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist or world_size == 1,
            ),
            metadata_errors,
        )

    look_again(once, ReplacedError)  # on every rank; what was read is read again
    if fill and isinstance(planner, LoadPlanner):
        # Stock gives the planner a state dict of its own, and takes back only the caller's keys.
        state_dict.update(planner.original_state_dict)
    return state_dict


def _end(writer: Any, planner: Any) -> None:
    """After a failure elsewhere the coordinator still holds its staging directory. A planner that
    is kept would hold what was saved, which may be no tensors of the trainer's."""
    if isinstance(planner, SavePlanner):
        planner.state_dict = {}
    if isinstance(writer, HuggingFaceStorageWriter):
        writer._end_session()
        writer._group_size = writer._sequence = None
