"""HuggingFaceStorageWriter: DCP's StorageWriter protocol on the engine.

It is a configuration. What one save does, step by step, is in directory_save.py, which has the
options as they were when it began (options.py) and knows no writer.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt.dcp.plan.ties import FinalNames
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.write.directory_save import DirectorySave
from torch_ckpt.dcp.write.layouts import Layouts, layout_of_arguments
from torch_ckpt.dcp.write.options import SaveOptions
from torch_ckpt.dcp.write.parts import next_sequence
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.files import checked_mapping
from torch_ckpt.native.torch_private import SHARDED_DIR_NAME
from torch_ckpt.options import local_path
from torch_ckpt.planning.collector import seldom_full_collections, usual_full_collections


class HuggingFaceStorageWriter(StockWriter):
    """Writes sharded or final safetensors, all or nothing.

    The positional arguments are those of
    `torch.distributed.checkpoint.HuggingFaceStorageWriter`:

    path: the checkpoint directory. It appears (or its new content does) when the save is whole.
    fqn_to_index_mapping: fqn to index of its file, from 1; every saved tensor must be in it. Or a
        model.safetensors.index.json, or the directory of one, whose division is taken.
    thread_count: threads that write this rank's files; at least 4, and 12 among the ranks of a
        node.
    save_distributed: every rank writes its own shards. False: final files of whole tensors, into
        which every rank writes what it has.
    enable_consolidation: with save_distributed, shards go to path/sharded and final files to path;
        without it the files are final already and nothing more is done.
    thread_count_consolidation: threads that merge; fewer than 4 mean 4.

    Keyword-only arguments of ours:

    layout: "sharded" and "final" say what save_distributed says. With "final" a file is no larger
        than 5 GB unless max_shard_size or the mapping says otherwise.
    max_shard_size: bytes, or text as "5GB" (10^9) or "5GiB", of the tensors of a final file, in the
        order of the state dict; a tensor that is larger has a file to itself. Not with a mapping.
        This, naming and dtype are of final files, with enable_consolidation of those that it makes.
    naming: what final files are called. "dcp": model-00001-of-00001.safetensors with an index,
        always; "hf" the same, but one file is model.safetensors without an index; "diffusers" is
        diffusion_pytorch_model in the same way, "peft" adapter_model.
    dtype, keep_fp32: in which dtypes final files hold the tensors; see DtypePolicy. They are cast
        while they are written, to the values of `tensor.to(dtype)`.
    extras: what is to stand in the directory beside the tensors, committed with them: a directory
        (all of it but weights and subdirectories), files, objects with `save_pretrained` (a
        configuration, a tokenizer, a model, without its weights), or a list of these. Asked on the
        coordinator only.
    overwrite: True replaces a checkpoint of torch_ckpt, and refuses a directory that holds one of
        stock DCP (ConflictError), which could not be told from the new one. "all" replaces that
        too: the commit removes its .metadata; its .distcp files stay. False refuses any.
    sync_files: False skips the fsync of data files: a machine that crashes can lose the save, and
        the checkpoint that it replaced.
    direct_io: False writes through the page cache.
    strict: a name of the mapping that is not in the state dict is an error, with final files and
        with a consolidation.
    allow_pickle: leaves that typed JSON cannot say are pickled instead of refused.
    world_size: for use_collectives=False, how many ranks save; the default group's size if None.

    With use_collectives=False every rank commits its own part, into a directory that holds no
    checkpoint; it can be read once all parts are there. Where ranks save values of one name that
    differ, the lowest rank's is read. Needs save_distributed, without enable_consolidation.

    Raises, from the save: CheckpointError kinds and OSError, naming file and tensor.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | str | os.PathLike[str] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        layout: Literal["sharded", "final"] | None = None,
        max_shard_size: int | str | None = None,
        naming: Literal["dcp", "hf", "diffusers", "peft"] = "dcp",
        dtype: Any = None,
        keep_fp32: Sequence[str] = (),
        extras: Any = None,
        overwrite: bool | Literal["all"] = True,
        sync_files: bool = True,
        direct_io: bool = True,
        strict: bool = True,
        allow_pickle: bool = False,
        world_size: int | None = None,
    ) -> None:
        written, self.consolidated = layout_of_arguments(
            layout,
            max_shard_size,
            DtypePolicy(dtype, keep_fp32),
            naming,
            extras,
            save_distributed=save_distributed,
            enable_consolidation=enable_consolidation,
            has_mapping=fqn_to_index_mapping is not None,
        )
        self.layouts = Layouts(written)
        super().__init__(
            path=os.fspath(path),
            fqn_to_index_mapping=fqn_to_index_mapping,  # type: ignore[arg-type]  # or a path
            thread_count=thread_count,
            save_distributed=not written.final,
            enable_consolidation=enable_consolidation,
            thread_count_consolidation=thread_count_consolidation,
        )
        if overwrite not in (True, False, "all"):
            raise InvalidArgumentError(f'overwrite is True, False or "all"; it was {overwrite!r}')
        self.overwrite: bool | Literal["all"] = overwrite  # type: ignore[assignment]  # stock's: bool
        self.sync_files = sync_files
        self.direct_io = direct_io
        self.strict = strict
        self.allow_pickle = allow_pickle
        self.world_size = world_size
        self.is_coordinator = False
        self._sequence: int | None = None  # see count_save
        self._save: DirectorySave | None = None  # that is going on
        self._place(os.fspath(path))

    def _place(self, path: str) -> None:
        """Shards and output follow the checkpoint id together."""
        # Now, not when it is used: an async save goes on while the trainer changes directory.
        self.path = Path(local_path(path))
        self.consolidated_output_path = None
        if self.enable_consolidation:
            self.consolidated_output_path = str(self.path)
            if self.save_distributed:
                self.path = self.path / SHARDED_DIR_NAME

    def __getstate__(self) -> dict[str, Any]:
        # Process-based async save pickles the writer; a save lives in one process.
        return {**self.__dict__, "_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, into `checkpoint_id` where given. Twice with one id is fine."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._place(os.fspath(checkpoint_id))

    def count_save(self, rank: int) -> None:
        """After `reset`, and before anything can fail, where that can be: without collectives,
        which save a rank takes part in follows from how many it has begun."""
        self._sequence = next_sequence(str(self.path), rank)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What `dcp.async_save` saves when it is given no stager: see PinnedMemoryStager."""
        self.per_thread_copy_ahead = 0  # as stock's: it says that there is nothing to copy ahead of
        stager = PinnedMemoryStager()
        return stager.stage(state_dict)  # type: ignore[return-value]  # is no Future

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As DCP calls it, with four more keywords of ours. world_size: how many ranks save,
        where the constructor was not told. on_written: called when this rank has written, or could
        not. began: when the save did, as `time.perf_counter` says it; now, if it is not given.
        metadata: JSON texts that the manifest is to say of the checkpoint, by their names."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self.rank is None and not is_coordinator:
            raise InvalidArgumentError(
                "the writer was not told its rank: DCP tells a set_up_storage_writer that takes "
                "**kwargs, and one that overrides it has to as well"
            )
        self.is_coordinator = is_coordinator
        self.end_save()
        options = {field.name: getattr(self, field.name) for field in fields(SaveOptions)}
        sequence, self._sequence = self._sequence, None
        world_size = kwargs.get("world_size") if self.world_size is None else self.world_size
        began = kwargs.get("began")
        self._save = DirectorySave(
            SaveOptions(**options),
            world_size,
            sequence,
            kwargs.get("on_written"),
            time.perf_counter() if began is None else began,
            kwargs.get("metadata") or {},
        )
        self._check_mapping()  # here too: a subclass need not call our prepare_local_plan
        seldom_full_collections(self)  # while the planner plans

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse here, before anything is on disk, what could not be written."""
        self._check_mapping()
        return self._going_on().check(plan)

    def final_names(self) -> FinalNames | None:
        """Which names stand in final files; None where there are none."""
        self._check_mapping()
        if self.layouts.final is None:
            return None
        return FinalNames(frozenset(self.fqn_to_index_mapping or ()), self.layouts.names_beside)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator, and without collectives every rank: lock the staging directory and clear
        what a dead save left."""
        return self._going_on().lay_out(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into staging. The future holds one RankReport."""
        save = self._going_on()
        usual_full_collections()
        return save.write(plan, lambda: self._write_plan(plan, planner))

    # Stock's private hooks, which subclasses override: it fills a queue by file and empties it.

    def _write_plan(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file_queue: queue.Queue[Any] = queue.Queue()
        tensors: list[WriteItem] = []
        objects: list[WriteItem] = []
        byte_io = WriteItemType.BYTE_IO  # found once: an Enum looks its members up
        for item in plan.items:
            (objects if item.type is byte_io else tensors).append(item)
        mapping = self.fqn_to_index_mapping
        buckets = self._split_by_storage_plan(mapping, tensors) if tensors else {}
        for index, items in buckets.items():
            file_queue.put((index, str(index), items))
        if objects:
            file_queue.put((None, "objects", objects))
        return self._write_data(planner, file_queue)

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[Any]
    ) -> Future[list[WriteResult]]:
        buckets: dict[int, list[WriteItem]] = {}
        objects: list[WriteItem] = []
        while not file_queue.empty():
            index, _, items = file_queue.get_nowait()
            if index is None:
                objects = items
            else:
                buckets[index] = items
        done: Future[list[WriteResult]] = Future()
        report = self._going_on().write_items(planner, buckets, objects)
        done.set_result([report])  # type: ignore[list-item]
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: commit, then consolidate where that was asked for. Without collectives
        every rank: commit its part."""
        self._going_on().commit(metadata, results)

    def begun_part(self) -> tuple[str, str]:
        """Without collectives, where this rank's part is staged, in words for other ranks."""
        return self._going_on().begun_part()

    def check_place(self, first: tuple[str, str]) -> None:
        """Raise IncompleteError where `first`, what `begun_part` gave on rank 0, is not seen."""
        self._going_on().check_place(first)

    def end_save(self) -> None:
        """Give up a save that failed on another rank, of which DCP does not tell the writer. Once
        more, and after one that is committed, is fine."""
        save, self._save = self._save, None
        if save is not None:
            save.end()

    def _going_on(self) -> DirectorySave:
        if self._save is None:
            raise InvalidArgumentError("was called on a writer that has not begun a save")
        self._save.mapping = self.fqn_to_index_mapping  # a subclass may have set another in a step
        return self._save

    def _check_mapping(self) -> None:
        self.fqn_to_index_mapping = checked_mapping(self.fqn_to_index_mapping)
