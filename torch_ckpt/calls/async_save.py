"""async_save: a Save in a thread, or in the process that saves, of a copy of the state."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch.distributed as dist
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageWriter

from torch_ckpt.calls.api import F, PathLike, eager, make_save, one_path, ranks_of
from torch_ckpt.calls.background import Background, heard_from
from torch_ckpt.calls.futures import AsyncSave, OnFailure, RunningSave
from torch_ckpt.calls.process import expect_process, saving_process
from torch_ckpt.calls.save import Save, SaveStats
from torch_ckpt.calls.turn import OnBusy, Turn, begin
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.write.options import WriterOptions
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import forget_frames
from torch_ckpt.export.renames import KeyMapping
from torch_ckpt.native.progress import Progress
from torch_ckpt.options import check_choice, local_path
from torch_ckpt.planning.states import HasState
from torch_ckpt.ranks import rank_and_size
from torch_ckpt.tensor_mapping.mapping import TensorMapping

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

_OURS = (HuggingFaceStorageWriter, type(None))


def _without_frames(function: F) -> F:
    """What `function` raises, the future has as well: without what its frames hold, which is this
    future again, and the state."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except BaseException as error:
            forget_frames(error)
            raise

    return call  # type: ignore[return-value]


@eager
@_without_frames
def async_save(
    state_dict: Mapping[str, Any] | HasState,
    path: PathLike | None = None,
    *,
    checkpoint_id: PathLike | None = None,
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
    log_path: PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    key_mapping: KeyMapping | None = None,
    tensor_mapping: TensorMapping | None = None,
    progress: Progress | None = None,
    **writer_options: Unpack[WriterOptions],
) -> AsyncSave:
    """`torch.distributed.checkpoint.async_save` with our writer, planner and stager as defaults.

    `state_dict` is as for `save`.

    Returns an AsyncSave, a future, when the tensors may change. With a stager that stages beside
    the trainer (`use_async_staging`) it returns before: the tensors may change when the
    `staging_completion` of the AsyncSave is done.

    The save goes on in a thread. Its ranks talk through connections of their own, so that it meets
    neither collectives nor timeouts of training. With AsyncCheckpointerType.PROCESS it goes on in
    another process of each rank, which is kept for the next saves.

    on_busy: what to do while an earlier async save of this process is not over. "wait" for it,
        "raise" ConflictError, or "overlap": stage now, and save when it is over. Saves that would
        share a writer, a planner or a stager that is not ours wait all the same.
    on_failure: "raise" raises errors from this call or from the future. An error that you do not
        take from the future is raised by the next call. With several ranks that call raises only
        what rank 0 has, which every failed save is; what fails on another rank alone is a warning
        there. "warn" makes warnings of all, for training that must go on; the future's result is
        None then.
    on_commit: called on every rank, in the background, when the checkpoint is committed and before
        the future is done. What it raises is the save's error. It must not save or load itself,
        which would wait for this save.
    log_path: as for `save`; the line is there before the future is done.
    timeout: seconds to wait for earlier saves.
    metadata: as for `save`.
    key_mapping, tensor_mapping, progress: as for `save`, but called in the background, or in
        another process; `progress` not from there.
    writer_options: keywords of HuggingFaceStorageWriter, as for `save`.

    Raises what `save` would. An error in one rank's arguments is raised on all ranks, an error
    while staging on that rank; the futures of all ranks raise the latter too, and all later ones.
    CheckpointError if an earlier save failed and its error has not been raised yet, and
    ConflictError for `on_busy`.
    """
    rank, size = rank_and_size(process_group, no_dist)
    own_stager = isinstance(async_stager, PinnedMemoryStager)
    where, log, bad_path = "", None, None
    try:
        where = _where(path, checkpoint_id, storage_writer)
        log = None if log_path is None else os.fsdecode(os.path.abspath(log_path))
    except Exception as error:
        bad_path = error
    in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
    running = RunningSave(
        SaveStats(where, rank, size, time.time()),
        on_failure,
        log,
        # What two saves cannot use at a time.
        (storage_writer, planner, None if own_stager else async_stager),
        None if in_process else threading.Event(),
    )
    background: Background | None = None
    turn: Turn | None = None
    made: list[Save] = []
    try:
        ranks = ranks_of(process_group, no_dist)
        beside = ranks_of(process_group, no_dist, "beside")

        def make() -> Save:
            if bad_path is not None:
                raise bad_path
            if in_process:
                expect_process()
            check_choice("on_busy", on_busy, get_args(OnBusy))
            check_choice("on_failure", on_failure, get_args(OnFailure))
            place = one_path(path, checkpoint_id)
            if place is not None and isinstance(storage_writer, _OURS):
                place = local_path(place)  # the save goes on in another working directory
            return make_save(
                place,
                storage_writer,
                planner,
                beside,
                use_collectives=use_collectives,
                key_mapping=key_mapping,
                tensor_mapping=tensor_mapping,
                progress=progress,
                metadata=metadata,
                options=dict(writer_options),
                cancel=running.cancel,
            )

        # What is wrong with one rank's arguments is an error of all.
        turn = begin(running, ranks, lambda: made.append(make()), on_busy, on_failure, timeout)
        (save,) = made
        process = (lambda: saving_process(process_group, beside)) if in_process else None
        stager = async_stager
        if stager is None:
            # As stock does it.
            stager = save.writer if isinstance(save.writer, AsyncStager) else PinnedMemoryStager()
        background = Background(running, save, stager, turn, process, on_commit)
        background.start()
        background.stage(state_dict)
        background.let_go()
    except BaseException as error:
        # Ctrl-C may come at any line. A state that the thread has already is saved.
        if background is None:
            if turn is not None:  # other ranks go on to save
                _refuse(made[0], error)
            running.finish(None, heard_from(error, running.stats))
            in_time = True
        else:
            in_time = background.give_up(error)
        if in_time:
            if on_failure == "warn" and isinstance(error, Exception):
                return running.future
            running.told()
        raise
    refused = background.refusal
    if refused is not None and (on_failure == "raise" or not isinstance(refused, Exception)):
        running.told()
        raise refused
    return running.future


def _refuse(save: Save, error: BaseException) -> None:
    """Take part in a save that this rank cannot begin, which fails it on all ranks."""

    def raising() -> dict[str, Any]:
        raise error

    with contextlib.suppress(BaseException):  # `error`, which the caller raises
        save.run(raising)


def _where(
    path: PathLike | None, checkpoint_id: PathLike | None, writer: StorageWriter | None
) -> str:
    place = path or checkpoint_id
    if not place:
        place = getattr(writer, "path", None)
        if not isinstance(place, str | os.PathLike):  # a user's writer may call anything its path
            return "" if writer is None else type(writer).__name__
    return os.fsdecode(os.path.abspath(place) if isinstance(writer, _OURS) else place)
