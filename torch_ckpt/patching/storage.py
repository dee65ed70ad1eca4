"""What does the work under the names of stock DCP while `patch_torch` is active.

Each takes the arguments of the stock object of its name, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockFileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torch_ckpt import consolidate, merge, torch_private
from torch_ckpt.checkpoint import MANIFEST
from torch_ckpt.children import write_durably
from torch_ckpt.dcp.load.reader import CheckpointReader
from torch_ckpt.dcp.save.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import ConflictError, UnsupportedError

_METADATA = ".metadata"
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
    refused: they transform the streams of stock's own format.
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
            overwrite=overwrite,
            sync_files=sync_files,
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        if self.use_collectives:  # else the parts of other ranks may not be there yet
            path = os.path.join(self.path, _METADATA)
            write_durably(path, _SAYS, f"{path}.torch_ckpt-new")


class FileSystemReader(CheckpointReader):
    """Reads every format that CheckpointReader does, stock's own among them."""

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
        ours, stocks = os.path.join(self.path, MANIFEST), os.path.join(self.path, _METADATA)
        if os.path.exists(ours) and os.path.exists(stocks):
            with open(stocks, "rb") as file:
                if file.read(len(_MARK)) != _MARK.encode():
                    raise ConflictError(
                        f"holds two checkpoints: {MANIFEST} is of torch_ckpt, {_METADATA} of stock "
                        "DCP. Remove the one that you do not mean",
                        file=os.fspath(self.path),
                    )
        return super().read_metadata()


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
) -> None:
    """`torch_ckpt.consolidate_safetensors_files`."""
    merge.consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """`torch_ckpt.consolidate_safetensors_files_on_every_rank`."""
    consolidate.consolidate_safetensors_files_on_every_rank(
        input_dir, output_dir, fqn_to_index_mapping, num_threads, process_group
    )


class _ChoosesNow:
    """A bare checkpoint_id is given its writer when `dcp.async_save` is called: in the thread the
    patch may be over, and another process has none."""

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        **others: Any,
    ) -> Any:
        if storage_writer is None and checkpoint_id:
            if StockFileSystemWriter.validate_checkpoint_id(checkpoint_id):  # and no URL
                storage_writer = FileSystemWriter(checkpoint_id)
        execute: Callable[..., Any] = super().execute_save  # type: ignore[misc]
        return execute(
            staging_future_or_state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            **others,
        )


class ThreadExecutor(_ChoosesNow, torch_private.ThreadExecutor):
    """Of `dcp.async_save`, by default."""


class ProcessExecutor(_ChoosesNow, torch_private.ProcessExecutor):
    """Of `dcp.async_save` with AsyncCheckpointerType.PROCESS."""
