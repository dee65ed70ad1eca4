"""torchtitan's CheckpointManager on this engine: one flag of an unchanged training.

    torchtitan ... --override.imports torch_ckpt.integrations.torchtitan.use_torch_ckpt

or `torch-ckpt run` before the program, which needs no flag.

What is saved and loaded, and when, stays torchtitan's code (components/checkpointer, of 0.3.0 and
of the development version in August 2026). How it is written and read, which steps count, and what
goes when there are too many, is ours.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as StockQuantizedReader,
)
from torch.distributed.checkpoint.staging import StagingOptions
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.checkpointer.dcp import CheckpointManager as Titans
from torchtitan.config.override import derive, override
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from torch_ckpt.calls import api
from torch_ckpt.calls.async_save import async_save
from torch_ckpt.checkpoint.checkpoint import was_committed
from torch_ckpt.checkpoint.names import CHILD
from torch_ckpt.dcp.read.quantized import QuantizedHuggingFaceStorageReader
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.patching.rebind import Patch, Replacement, Table
from torch_ckpt.ranks import Ranks
from torch_ckpt.runs.directory import CheckpointDirectory
from torch_ckpt.runs.place import newest_first
from torch_ckpt.runs.retention import is_committed

# By which torchtitan tells that a step is whole: the last file that stock writes of one.
_MARKS = (".metadata", "model.safetensors.index.json")


def _of_titan(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, mark)) for mark in _MARKS)


def _counts(path: str) -> bool:
    return was_committed(path) or _of_titan(path)


def _is_whole(path: str) -> bool:
    """As `_counts`, but for a step of ours that has lost a file since."""
    return is_committed(path) if was_committed(path) else _of_titan(path)


class _Steps(CheckpointDirectory):
    """Steps of ours, and those that torchtitan wrote without us."""

    _counts = staticmethod(_counts)
    _is_whole = staticmethod(_is_whole)


class CheckpointManager(Titans):
    """torchtitan's CheckpointManager, with saves and loads of torch_ckpt.

    Of its policy all is torchtitan's, with these differences:

    - A step counts when it is whole: by our manifest, or, of one that torchtitan wrote, by its
      `.metadata` or index. Rank 0 says for all ranks which is the newest.
    - What goes beyond `keep_latest_k` goes after the commit, in the background, and by whole steps
      alone; the last step is one of them.
    - Both async modes work without a device as well. They save in a thread of this process;
      "async_with_pinned_mem" copies beside the training until its next `optimizer.step()`, "async"
      before it returns.
    - The last step with `last_save_model_only` is of whole tensors in final files, as they are
      called on the Hugging Face Hub, and cast to `export_dtype` while they are written.
    - An error of one rank is raised on all of them, and names it.

    Loads read the steps that torchtitan wrote, as well. Raises UnsupportedError for a folder that
    is a URL, CheckpointError kinds and OSError.
    """

    enable: bool
    folder: str
    save_future: Future[Any] | None
    staging_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config(Titans.Config):
        """Fields and defaults are torchtitan's."""

    def __init__(self, config: Config, **objects: Any) -> None:
        super().__init__(config, **objects)
        if not self.enable:
            return
        if "://" in self.folder:
            self.enable = False  # or `close`, which `__del__` calls, would find half of a manager
            raise UnsupportedError(
                "is a URL, and torch_ckpt writes to file systems that are mounted; leave "
                "use_torch_ckpt out of --override.imports",
                file=self.folder,
            )
        self._steps: _Steps | None = None  # from the first save on
        self._newest: int | None = None  # that rank 0 has found, in a load
        # Where it is None torchtitan makes one of its own, which needs a device.
        beside = StagingOptions(
            False, False, self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM, False
        )
        self.stager = PinnedMemoryStager(beside)

    @property
    def _ranks(self) -> Ranks:
        return Ranks.of(self.pg)

    # --- saving -------------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Future[Any] | None:
        """Save `state_dict`, as torchtitan's method of this name. Returns the AsyncSave of an async
        mode, which is a Future and an AsyncSaveResponse.

        to_hf: under the names of the Hugging Face Hub, divided into files as `hf_assets_path` is,
            if that has an index.
        dtype: what floats are cast to while they are written; final files then, also without to_hf.
        """
        mapping: dict[Any, int] | None = None
        if to_hf:
            adapter = self._adapter()
            state_dict = adapter.to_hf(state_dict)
            mapping = adapter.fqn_to_index_mapping
        writer = HuggingFaceStorageWriter(
            checkpoint_id,
            mapping,
            layout="final" if to_hf or dtype is not None else "sharded",
            dtype=dtype,
            strict=False,  # the model may leave out parts of the one on the Hub
            # A step that torchtitan wrote goes: its `.metadata` would name an old state.
            overwrite="all",
        )
        saved = self._save_step(state_dict, checkpoint_id, writer, async_mode)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def _save_step(
        self,
        state_dict: dict[str, Any],
        path: str,
        writer: HuggingFaceStorageWriter,
        mode: AsyncMode,
    ) -> Future[Any] | None:
        folder, name = os.path.split(os.path.normpath(path))
        match = CHILD.fullmatch(name)
        if match is None or folder != os.path.normpath(self.folder):  # by somebody else's call
            if mode is AsyncMode.DISABLED:
                api.save(state_dict, path, storage_writer=writer, process_group=self.pg)
                return None
            return async_save(
                state_dict,
                path,
                storage_writer=writer,
                process_group=self.pg,
                async_stager=self.stager,
            )
        if self._steps is None:
            keep = self.keep_latest_k or None
            self._steps = _Steps(self.folder, keep_last=keep, process_group=self.pg)
        step = int(match[1])
        if mode is AsyncMode.DISABLED:
            self._steps.save(state_dict, step, storage_writer=writer)
            return None
        return self._steps.async_save(
            state_dict, step, storage_writer=writer, async_stager=self.stager
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # Asked here as well: most calls are of steps that are not saved, and wait for nobody.
        if not self._should_save(curr_step, last_step):
            return False
        try:
            with self._ranks.as_one(f"save of step {curr_step}"):
                saved: bool = super()._save(curr_step, last_step)
        except Exception:
            # What this rank has begun fails on all: who waits next does not hear of it again.
            future, self.save_future, self.staging_future = self.save_future, None, None
            if future is not None:
                future.exception()
            raise
        return saved

    def _save_last_step(self, curr_step: int) -> None:
        if not self.last_save_model_only:
            super()._save_last_step(curr_step)
            return
        logger.info("Saving the model alone at the last step, in %s.", self.export_dtype)
        # Not cast here, as torchtitan does, which takes the memory of another model.
        self.dcp_save(
            self.states[MODEL].state_dict(),
            checkpoint_id=self._create_checkpoint_id(curr_step),
            async_mode=AsyncMode.DISABLED,
            enable_garbage_collection=True,
            to_hf=self.last_save_in_hf,
            dtype=self.export_dtype,
        )

    def _purge_stale_checkpoints(self) -> None:
        """Nothing: each save does, when it is committed."""

    # --- loading ------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        with self._ranks.as_one("load of a step"):
            if step == -1:
                self._newest = self._ranks.decide("step to load", self._find_load_step)
            try:
                loaded: bool = super()._load(step)
            finally:
                self._newest = None
        return loaded

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that counts, or -1. In a load, what rank 0 has found."""
        if self._newest is not None and not folder:
            return self._newest
        folder = folder or self.folder
        if not os.path.isdir(folder):
            return -1
        return next(newest_first(folder, _counts), -1)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load `state_dict` in place, and the model, as torchtitan's method of this name."""
        if not from_hf:
            api.load(state_dict, checkpoint_id)
            if MODEL in self.states:
                self.states[MODEL].load_state_dict(state_dict)
            return
        adapter = self._adapter()
        stored = adapter.to_hf(state_dict)
        if from_quantized:
            reader = adapter.get_hf_storage_reader(checkpoint_id, True)
            if type(reader) is StockQuantizedReader:
                reader = QuantizedHuggingFaceStorageReader(
                    checkpoint_id, reader.thread_count, reader.target_dtype, reader.block_size
                )
            api.load(stored, storage_reader=reader)
        else:
            api.load(stored, checkpoint_id)
        loaded = adapter.from_hf(stored)
        left = sorted(state_dict.keys() - loaded.keys())
        if left:
            logger.warning(
                "%s: the model keeps its own values of %d tensors that the Hugging Face form does "
                "not have: %s",
                *(checkpoint_id, len(left), ", ".join(left[:10])),
            )
        self.states[MODEL].load_state_dict(loaded)

    def _adapter(self) -> Any:
        if self.sd_adapter is None:
            raise InvalidArgumentError("the model has no adapter to the Hugging Face form")
        return self.sd_adapter

    # --- ending -------------------------------------------------------------

    def _close(self) -> None:
        steps = getattr(self, "_steps", None)  # `__del__` calls this, where `__init__` has failed
        try:
            if steps is not None:
                steps.close()
        finally:
            super()._close()


@override(target=Titans.Config, description="torch_ckpt saves and loads checkpoints")
def use_torch_ckpt(config: Any) -> CheckpointManager.Config:
    """The override for `--override.imports`: the same configuration, of our CheckpointManager."""
    if type(config) is not Titans.Config and not isinstance(config, CheckpointManager.Config):
        raise UnsupportedError(
            f"use_torch_ckpt takes the place of torchtitan's CheckpointManager, and the training "
            f"has a {type(config).__qualname__} of {type(config).__module__}"
        )
    made: CheckpointManager.Config = derive(config, CheckpointManager.Config)
    return made


class _Installed(CheckpointManager):
    """Ours under torchtitan's name: what a program has imported of ours by itself stays when that
    is undone."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Fields and defaults are torchtitan's."""


_TABLE = Table(
    "torch_ckpt.integrations.torchtitan.install",
    "torchtitan",
    [Replacement(Titans, _Installed, "torchtitan")],
)


def install() -> Patch:
    """Put our CheckpointManager in the place of torchtitan's in all modules, as `torch-ckpt run`
    does; to be called before the configuration is made. Returns what undoes it."""
    return Patch(_TABLE, ["torchtitan"])
