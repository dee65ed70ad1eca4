"""Every way to save in the background that the async rows compare.

A contender is named by a string, because its save runs in another process, see
:mod:`benchmarks.async_trainer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from benchmarks import rivals, row_save, states
from benchmarks.contender import Role

Save = Callable[[states.State, Path], Future[Any] | AsyncSaveResponse]
Make = Callable[[contextlib.ExitStack], Save]
Read = Callable[[Path, states.State], states.State]

THREAD = AsyncCheckpointerType.THREAD
PROCESS = AsyncCheckpointerType.PROCESS

# Stock's DefaultStager() asserts that there is an accelerator, so the options are spelled out.
PLAIN = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
ASYNC = dataclasses.replace(PLAIN, use_shared_memory=True, use_async_staging=True)


def read_safetensors(path: Path, sample: states.State) -> states.State:
    """The sampled tensors from safetensors files."""
    return rivals.read_safetensors(path, sample)


@dataclasses.dataclass(frozen=True)
class AsyncContender:
    """One way to save in the background."""

    role: Role
    make: Make
    """Called once in a trainer: what is made here, such as a stager, serves all of its saves and
    is closed with the stack."""
    read: Read = read_safetensors
    """The sampled tensors of a checkpoint."""
    skip: str = ""


def stock(
    writer: Callable[[Path], Any],
    kind: AsyncCheckpointerType,
    stager: Callable[[], Any] | None = None,
) -> Make:
    """dcp.async_save with a stager that is kept, or with the writer's own, as by default."""

    def make(closing: contextlib.ExitStack) -> Save:
        made = None if stager is None else stager()
        if made is not None:
            closing.callback(made.close)
        return lambda state, path: async_save(
            state,
            storage_writer=writer(path),
            async_stager=made,
            async_checkpointer_type=kind,
        )

    return make


def ours(stager: Callable[[], Any] | None = None, *, prepare: int = 0, **options: Any) -> Make:
    """torch_ckpt.async_save with a stager that is kept, or with its own.

    ``prepare``: bytes whose memory has been made before the first save.
    """

    def make(closing: contextlib.ExitStack) -> Save:
        kept = dict(options)
        if prepare > 0:
            kind = options.get("async_checkpointer_type", THREAD)
            preparing = our_stager(PLAIN, prepare=prepare, async_checkpointer_type=kind)
            preparing.stage({})  # waits for it
            preparing.close()
        if stager is not None:
            kept["async_stager"] = stager()
            closing.callback(kept["async_stager"].close)
        save = rivals.ours("async_save")
        return lambda state, path: save(state, checkpoint_id=str(path), **kept)

    return make


def our_writer(path: Path) -> Any:
    """Our writer for the stock calls."""
    return rivals.ours("HuggingFaceStorageWriter")(str(path))


def our_stager(options: StagingOptions, **more: Any) -> Any:
    """Our stager."""
    return rivals.ours("PinnedMemoryStager")(options, **more)


def stock_hf_writer(path: Path) -> Any:
    """Stock's writer of safetensors."""
    return HuggingFaceStorageWriter(str(path))


def stock_fs_writer(path: Path) -> Any:
    """Stock's writer of its own format, with the threads that make it fastest."""
    return FileSystemWriter(path, thread_count=2)


def torch_checkpointing(closing: contextlib.ExitStack) -> Save:
    """Its manager; its files are of the same format as ours."""
    import torch_checkpointing as package
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    layout = LayoutInfo("model.safetensors", SafetensorsSerialization())
    manager = package.CheckpointManager(
        package.CheckpointManager.Config(
            items={"model": package.ItemSpec(layout=layout)},
            # Its call returns no future of the staging, so that staging is done when it returns.
            save=AsyncCheckpointSaverConfig(
                staging_config=CheckpointStagerConfig(use_async_staging=False)
            ),
            # Its direct writes are not aligned, and file systems refuse them.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    closing.callback(manager.close)

    def save(state: states.State, path: Path) -> Future[Any]:
        future: Future[Any] = manager.save(str(path), {"model": state})
        return future

    return save


def contenders(bytes_: int) -> dict[str, AsyncContender]:
    """All of them by name, in the order of the report, for a state of that size."""
    found: dict[str, AsyncContender] = {}
    for kind in (THREAD, PROCESS):
        for format_, writer in (("HF", stock_hf_writer), ("FS", stock_fs_writer)):
            read = read_safetensors if format_ == "HF" else row_save.read_file_system
            name = f"DCP {format_} {kind.name}"
            # What is left out blocks as long as what is here, and is durable no sooner.
            if kind is THREAD:
                found[name] = AsyncContender("rival", stock(writer, kind), read)
            if (format_, kind) != ("HF", PROCESS):
                stager = functools.partial(DefaultStager, ASYNC)
                made = AsyncContender("rival", stock(writer, kind, stager), read)
                found[f"{name}, kept async stager"] = made
    found["torch_checkpointing"] = AsyncContender(
        "rival", torch_checkpointing, skip=rivals.why_not_torch_checkpointing()
    )
    skip = rivals.why_not_ours("async_save", "HuggingFaceStorageWriter", "PinnedMemoryStager")
    for name, make in {
        "ours, async_save": ours(),
        "ours, memory prepared": ours(prepare=bytes_),
        "ours, kept async stager": ours(lambda: our_stager(ASYNC)),
        "ours, kept stager for dcp.async_save": stock(
            our_writer, THREAD, lambda: our_stager(PLAIN)
        ),
        "ours, PROCESS": ours(async_checkpointer_type=PROCESS),
        "ours, PROCESS, memory prepared": ours(prepare=bytes_, async_checkpointer_type=PROCESS),
    }.items():
        found[name] = AsyncContender("ours", make, skip=skip)
    return found
