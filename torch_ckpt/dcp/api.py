"""save, async_save, load: stock's calls with our planners, writer and reader, and clean-up."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.dcp.planner import LoadPlanner, SavePlanner
from torch_ckpt.dcp.planning import paused_while_trainer_waits
from torch_ckpt.dcp.reader import HuggingFaceStorageReader
from torch_ckpt.dcp.stager import OneSaveStager, PinnedMemoryStager
from torch_ckpt.dcp.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import CheckpointError, InvalidArgumentError, with_rank

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_PathLike = str | os.PathLike[str]
_OURS = (HuggingFaceStorageWriter, type(None))


def _eager(function: F) -> F:
    """I/O is never traced: torch.compile breaks the graph here."""
    disabled: F = torch.compiler.disable(function)
    return disabled


def _writer(writer: Any, checkpoint_id: _PathLike | None, rank: int, world_size: int) -> Any:
    if writer is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("save needs a checkpoint_id or a storage_writer")
        writer = HuggingFaceStorageWriter(checkpoint_id, save_distributed=True)
    if isinstance(writer, HuggingFaceStorageWriter):
        writer.reset(checkpoint_id)
        writer._begin_save(rank, world_size)
    return writer


def _planner(
    planner: stock_planner.SavePlanner | None,
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
) -> stock_planner.SavePlanner:
    if planner is None:
        planner = SavePlanner(rank=rank, world_size=world_size)
    if isinstance(planner, SavePlanner):
        # DCP does not tell it either.
        alone = world_size == 1
        planner._group = (rank,) if alone else tuple(dist.get_process_group_ranks(group))
    return planner


_MetadataErrors = Callable[[], list[Exception | None]]


def _first_failure(
    error: CheckpointException, metadata_errors: _MetadataErrors | None
) -> BaseException:
    """The failure of the lowest rank, as itself, so that `except Exception` catches it (it does
    not catch a CheckpointException) and its kind, errno and file are there."""
    rank = min(error.failures)
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
            # Single-process use is intended where no process group was made.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return call()
    except CheckpointException as error:
        raise _first_failure(error, metadata_errors) from error


def _ranks(group: dist.ProcessGroup | None, no_dist: bool = False) -> tuple[int, int]:
    """What PerRank values are saved and loaded under: this rank, and how many the group has."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


@_eager
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: stock_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """`torch.distributed.checkpoint.save` with our writer and planner as defaults.

    Without a `storage_writer`, every rank's shards go to directory `checkpoint_id`. Raises
    CheckpointError kinds or OSError, naming the rank, on every rank; nothing of a failed save is
    left, and what stood there before still loads. Called from the main thread, it keeps Python's
    cyclic garbage collector off until it returns.
    """
    rank, world_size = _ranks(process_group, no_dist)
    writer = _writer(storage_writer, checkpoint_id, rank, world_size)
    try:
        # Planning makes some twenty objects per tensor, with stock's planner a hundred; collecting
        # between them takes longer than making them.
        with paused_while_trainer_waits(keeps=False):
            metadata: Metadata = _checked(
                lambda: state_dict_saver.save(
                    state_dict,
                    checkpoint_id=checkpoint_id,
                    storage_writer=writer,
                    planner=_planner(planner, process_group, rank, world_size),
                    process_group=process_group,
                    no_dist=no_dist,
                    use_collectives=use_collectives,
                )
            )
        return metadata
    finally:
        _end(writer)


@_eager
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: stock_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """`torch.distributed.checkpoint.async_save` with our writer and planner as defaults.

    `options` are stock's: async_checkpointer_type, async_stager, no_dist, use_collectives. Returns
    what stock returns; its future raises what `save` would.
    """
    rank, world_size = _ranks(process_group, options.get("no_dist", False))
    if checkpoint_id is not None and isinstance(storage_writer, _OURS):
        checkpoint_id = os.path.abspath(checkpoint_id)  # the save goes on in another directory
    writer = _writer(storage_writer, checkpoint_id, rank, world_size)
    planner = _planner(planner, process_group, rank, world_size)
    stager = options.pop("async_stager", None)
    if stager is None and isinstance(writer, HuggingFaceStorageWriter):
        stager = writer  # as stock does it
    if isinstance(stager, HuggingFaceStorageWriter | PinnedMemoryStager):
        stager = OneSaveStager(stager)

    def end() -> None:
        _end(writer)
        if isinstance(stager, OneSaveStager):
            stager.end()

    answer = _checked(
        lambda: state_dict_saver.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            async_stager=stager,
            **options,
        )
    )
    if isinstance(answer, Future):
        return _settled(answer, end)
    answer.upload_completion = _settled(answer.upload_completion, end)
    return answer


def _settled(upload: Future[Any], end: Callable[[], None]) -> Future[Any]:
    """The future of a save that has cleaned up: done after `upload` and `end`, with the error of
    the lowest rank as itself."""
    settled: Future[Any] = Future()
    settled.set_running_or_notify_cancel()

    def settle(done: Future[Any]) -> None:
        try:
            end()
            error = done.exception()
        except BaseException as failure:  # or nobody would ever hear
            settled.set_exception(failure)
            return
        if error is None:
            settled.set_result(done.result())
        elif isinstance(error, CheckpointException):
            first = _first_failure(error, None)
            first.__cause__ = error
            settled.set_exception(first)
        else:
            settled.set_exception(error)

    upload.add_done_callback(settle)
    return settled


@_eager
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_reader: StorageReader | None = None,
    planner: stock_planner.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """`torch.distributed.checkpoint.load` with our reader and planner as defaults.

    Raises CheckpointError kinds or OSError, naming the rank, on every rank.
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("load needs a checkpoint_id or a storage_reader")
        storage_reader = HuggingFaceStorageReader(checkpoint_id)
    reader = storage_reader
    rank, world_size = _ranks(process_group, no_dist)
    fill = not state_dict and isinstance(planner, LoadPlanner) and planner.rebuild

    def metadata_errors() -> list[Exception | None]:
        """What read_metadata raised, by rank. A collective call."""
        errors: list[Exception | None] = [getattr(reader, "metadata_error", None)] * world_size
        if world_size > 1:
            dist.all_gather_object(errors, errors[rank], group=process_group)
        return errors

    _checked(
        lambda: state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner or LoadPlanner(rank=rank, world_size=world_size),
            process_group=process_group,
            no_dist=no_dist,
        ),
        metadata_errors,
    )
    if fill and isinstance(planner, LoadPlanner):
        # Stock gives the planner a state dict of its own, and takes back only the caller's keys.
        state_dict.update(planner.original_state_dict)


def _end(writer: Any) -> None:
    """After a failure elsewhere the coordinator still holds its staging directory."""
    if isinstance(writer, HuggingFaceStorageWriter):
        writer._end_session()
        writer._group_size = writer._sequence = None
