"""save, async_save, load: stock's calls with our planners, writer and reader, and clean-up."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.dcp.planner import LoadPlanner, SavePlanner
from torch_ckpt.dcp.reader import HuggingFaceStorageReader
from torch_ckpt.dcp.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import CheckpointError, InvalidArgumentError, with_rank

T = TypeVar("T")
_PathLike = str | os.PathLike[str]


def _writer(writer: Any, checkpoint_id: _PathLike | None) -> Any:
    if writer is not None:
        return writer
    if checkpoint_id is None:
        raise InvalidArgumentError("save needs a checkpoint_id or a storage_writer")
    return HuggingFaceStorageWriter(checkpoint_id, save_distributed=True)


def _first_failure(error: CheckpointException) -> BaseException:
    """The failure of the lowest rank, as itself: `except CheckpointError` and `except OSError`
    catch it, which they do not catch a CheckpointException (that is no Exception)."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if isinstance(cause, (CheckpointError, OSError)):
        return with_rank(cause, rank)
    return error


def _checked(call: Callable[[], T]) -> T:
    try:
        with warnings.catch_warnings():
            # Single-process use is intended where no process group was made.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return call()
    except CheckpointException as error:
        first = _first_failure(error)
        if first is error:
            raise
        raise first from error


@torch.compiler.disable
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: dcp.StorageWriter | None = None,
    planner: dcp.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """`torch.distributed.checkpoint.save` with our writer and planner as defaults.

    Without a `storage_writer`, every rank's shards go to directory `checkpoint_id`. Raises
    CheckpointError kinds or OSError, naming the rank, on every rank; nothing of a failed save is
    left, and what stood there before still loads.
    """
    writer = _writer(storage_writer, checkpoint_id)
    try:
        return _checked(
            lambda: dcp.save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner or SavePlanner(),
                process_group=process_group,
                no_dist=no_dist,
                use_collectives=use_collectives,
            )
        )
    finally:
        _end(writer)


@torch.compiler.disable
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_writer: dcp.StorageWriter | None = None,
    planner: dcp.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """`torch.distributed.checkpoint.async_save` with our writer and planner as defaults.

    `options` are stock's: async_checkpointer_type, async_stager, no_dist, use_collectives. Returns
    what stock returns; its future raises what `save` would.
    """
    writer = _writer(storage_writer, checkpoint_id)
    return _checked(
        lambda: dcp.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner or SavePlanner(),
            process_group=process_group,
            **options,
        )
    )


@torch.compiler.disable
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _PathLike | None = None,
    storage_reader: dcp.StorageReader | None = None,
    planner: dcp.LoadPlanner | None = None,
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
    _checked(
        lambda: dcp.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner or LoadPlanner(),
            process_group=process_group,
            no_dist=no_dist,
        )
    )


def _end(writer: Any) -> None:
    """After a failure elsewhere the coordinator still holds its staging directory."""
    if isinstance(writer, HuggingFaceStorageWriter):
        writer._end_session()
