"""What does the work under the names of stock DCP while `patch_torch` is active.

Each takes the arguments of the stock object of its name, and no others. What a program has kept of
it when the patch is over does what stock does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockFileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torch_ckpt.checkpoint.names import (
    JOURNAL,
    MANIFEST,
    METADATA,
    NEW,
    PART_MANIFEST,
    RANK_METADATA,
)
from torch_ckpt.dcp.read import reader
from torch_ckpt.dcp.read.reader import CheckpointReader
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import ConflictError, UnsupportedError
from torch_ckpt.export import consolidate, merge
from torch_ckpt.native import torch_private
from torch_ckpt.patching.groups import DEFAULT_STORAGE, HF, is_wanted
from torch_ckpt.patching.own_group import own_group
from torch_ckpt.runs.place import write_durably

_DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # newer than torch 2.10
# No pickle begins so: stock's reader raises UnpicklingError at once.
_MARK = "# torch_ckpt"
_SAYS = (
    f"{_MARK} wrote the checkpoint in this directory. This file is here for programs that look\n"
    "# for one of its name. To load: torch_ckpt.load, CheckpointReader or patch_torch.\n"
)


class FileSystemWriter(HuggingFaceStorageWriter):
    """Writes the shards of each rank, and last `.metadata`, by whose presence programs know a
    checkpoint of stock; it holds a line of text.

    single_file_per_rank, per_thread_copy_ahead, cache_staged_state_dict and serialization_format
    change nothing: each rank writes a file, without copies, of safetensors. `_extensions` are
    refused: they transform the streams of stock's own format. A checkpoint of stock is replaced by
    the commit, which removes its .metadata; overwrite=False refuses checkpoints of either. So is
    use_collectives=False refused, by the save: with it stock gives each rank its own value of a
    name that several have saved, and a checkpoint of ours has one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        if _extensions:
            raise UnsupportedError("FileSystemWriter(_extensions=...) needs stock's own format")
        super().__init__(
            path,
            thread_count=thread_count,
            save_distributed=True,
            overwrite="all" if overwrite else False,  # programs go on where stock has saved
            sync_files=sync_files,
        )
        # For programs that ask the writer what they have given it.
        self.single_file_per_rank = single_file_per_rank
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.serialization_format = serialization_format

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "FileSystemWriter saves with use_collectives=True only while patch_torch is "
                "active: without, stock keeps every rank's own value of a name, and torch_ckpt "
                "one of them",
                file=os.fspath(self.path),
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        stocks = _name_of_stocks(self.path)
        if stocks is not None and stocks != METADATA:  # which `finish` would replace
            raise ConflictError(
                f"holds what stock DCP saved without collectives ({stocks}); remove it, or a load "
                "could not tell which of the two is meant",
                file=os.fspath(self.path),
            )
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_meta = self.storage_meta()
        if _DCP_VERSION is not None:
            metadata.version = _DCP_VERSION
        _leave_metadata(self.path)


def _leave_metadata(path: str | os.PathLike[str]) -> None:
    """`.metadata`, in the directory `path`. Several saves may come to this at the same time."""
    name = os.path.join(path, METADATA)
    if not _is_ours(name):
        write_durably(name, _SAYS, f"{name}{NEW}{secrets.token_hex(8)}")


def _is_ours(metadata: str) -> bool:
    try:
        with open(metadata, "rb") as file:
            return file.read(len(_MARK)) == _MARK.encode()
    except FileNotFoundError:
        return False


def _names(path: str | os.PathLike[str]) -> list[str]:
    """Of what is in the directory; none where it is a file, or not there."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name_of_ours(path: str | os.PathLike[str]) -> str | None:
    """A file by which the directory `path` holds a checkpoint of torch_ckpt; None: it does not."""
    if os.path.exists(os.path.join(path, JOURNAL)):
        return JOURNAL
    return next(
        (name for name in _names(path) if name == MANIFEST or PART_MANIFEST.fullmatch(name)), None
    )


def _name_of_stocks(path: str | os.PathLike[str]) -> str | None:
    """The same of stock DCP, with collectives or without."""
    for name in _names(path):
        if RANK_METADATA.fullmatch(name):
            return name
        if name == METADATA and not _is_ours(os.path.join(path, name)):
            return name
    return None


class FileSystemReader(CheckpointReader):
    """Reads every format that CheckpointReader does, stock's own among them, but for what stock has
    saved without collectives. Passes over .safetensors files beside what stock has saved, as stock
    does."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        thread_count: int = 1,  # newer than torch 2.13
    ) -> None:
        if _extension_registry is not None:
            raise UnsupportedError("FileSystemReader(_extension_registry=...) needs stock's own")
        super().__init__(path, thread_count)

    def read_metadata(self) -> Metadata:
        """Refuses, with a ConflictError, a directory to which both have saved: programs save to one
        path with the patch and without it, and either may be the newer one."""
        ours, stocks = _name_of_ours(self.path), _name_of_stocks(self.path)
        if ours is not None and stocks is not None:
            raise ConflictError(
                f"holds two checkpoints: {ours} is of torch_ckpt, {stocks} of stock DCP. "
                "Remove the one that you do not mean",
                file=os.fspath(self.path),
            )
        return super().read_metadata()

    def _format_here(self) -> str | None:
        return "dcp" if _name_of_stocks(self.path) == METADATA else None


class HuggingFaceStorageReader(reader.HuggingFaceStorageReader):
    """Reads every format, but .safetensors files where stock DCP has saved .distcp files beside
    them, as stock's reader does."""

    def _format_here(self) -> str | None:
        if self.format is None and _name_of_ours(self.path) is None:
            return "hf" if _name_of_stocks(self.path) is not None else None
        return self.format


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
) -> None:
    """`torch_ckpt.consolidate_safetensors_files`. What the mapping does not name is left out, as
    stock does it."""
    if not is_wanted(HF):
        torch_private.stock_consolidate(
            os.fspath(input_dir), os.fspath(output_dir), fqn_to_index_mapping, num_threads
        )
        return
    merge.consolidate_safetensors_files(
        input_dir, output_dir, fqn_to_index_mapping, num_threads, strict=False, overwrite=True
    )


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """`torch_ckpt.consolidate_safetensors_files_on_every_rank`, in the same way."""
    if not is_wanted(HF):
        torch_private.stock_consolidate_on_every_rank(
            os.fspath(input_dir),
            os.fspath(output_dir),
            fqn_to_index_mapping,
            num_threads,
            process_group,
        )
        return
    consolidate.consolidate_safetensors_files_on_every_rank(
        input_dir,
        output_dir,
        fqn_to_index_mapping,
        num_threads,
        process_group,
        strict=False,
        overwrite=True,
    )


class _ChoosesNow:
    """A bare checkpoint_id is given its writer when `dcp.async_save` is called: in the thread the
    patch may be over, and another process has none."""

    in_thread = False

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        **others: Any,
    ) -> Any:
        ours = isinstance(storage_writer, HuggingFaceStorageWriter)
        if is_wanted(DEFAULT_STORAGE) and storage_writer is None and checkpoint_id:
            if StockFileSystemWriter.validate_checkpoint_id(checkpoint_id):  # and no URL
                storage_writer, ours = FileSystemWriter(checkpoint_id), True
        if self.in_thread and ours and process_group is None and not no_dist:
            process_group = own_group()
        execute: Callable[..., Any] = super().execute_save  # type: ignore[misc]
        return execute(
            staging_future_or_state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            process_group=process_group,
            no_dist=no_dist,
            **others,
        )


class ThreadExecutor(_ChoosesNow, torch_private.ThreadExecutor):
    """Of `dcp.async_save`, by default. Where no process group is given, a save of ours has one of
    its own: in the default one it would meet the collectives of training."""

    in_thread = True


class ProcessExecutor(_ChoosesNow, torch_private.ProcessExecutor):
    """Of `dcp.async_save` with AsyncCheckpointerType.PROCESS."""
