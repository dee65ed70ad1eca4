"""HuggingFaceStorageWriter: DCP's StorageWriter protocol on the engine.

What travels between ranks is one `RankReport` each, through DCP's own gather of write results.
Nothing that a rank needs is in `storage_data`: with cached plans a rank writes by the plan of an
earlier save. The staging directory is a function of the path, and its `save_id` file tells every
rank which save it is part of.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint._hf_utils import SHARDED_DIR_NAME
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _core
from torch_ckpt.dcp import plan_cache
from torch_ckpt.dcp.commit import Phases, RankReport, commit_request
from torch_ckpt.dcp.final_layout import (
    check_castable,
    check_mapped,
    check_planned,
    checked_layout,
    final_tensors,
)
from torch_ckpt.dcp.global_plan import check_catalog_size
from torch_ckpt.dcp.parts import Part, check_supported, next_sequence, part_of
from torch_ckpt.dcp.rank_write import RankWrite
from torch_ckpt.dcp.reserved import RESERVED
from torch_ckpt.dcp.rings import RankNote, note_of, this_node
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.stock_planner import (
    leaf_digests,
    warn_of_differing_leaves,
)
from torch_ckpt.dcp.write_files import check_item
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.errors import CheckpointError, ConflictError, InvalidArgumentError, with_rank
from torch_ckpt.extras import extra_files
from torch_ckpt.jobs import MIN_WORKERS, Job, PartSession, SaveSession
from torch_ckpt.mapping import NAMINGS, checked_mapping
from torch_ckpt.merge import merge, merge_request
from torch_ckpt.options import local_path


class HuggingFaceStorageWriter(StockWriter):
    """Writes sharded or final safetensors, all or nothing.

    The positional arguments are those of
    `torch.distributed.checkpoint.HuggingFaceStorageWriter`:

    path: the checkpoint directory. It appears (or its new content does) when the save is whole.
    fqn_to_index_mapping: fqn to index of its file, from 1; every saved tensor must be in it. Or a
        model.safetensors.index.json, or the directory of one, whose division is taken.
    thread_count: threads that write this rank's files, at least four.
    save_distributed: every rank writes its own shards. False: final files of whole tensors, into
        which every rank writes what it has.
    enable_consolidation: with save_distributed, shards go to path/sharded and final files to path;
        without it the files are final already and nothing more is done.
    thread_count_consolidation: threads that merge, at least four.

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
    overwrite: False refuses a directory that holds a checkpoint (ConflictError).
    sync_files: False leaves durability to the kernel; a machine that crashes may lose the save.
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
        overwrite: bool = True,
        sync_files: bool = True,
        direct_io: bool = True,
        strict: bool = True,
        allow_pickle: bool = False,
        world_size: int | None = None,
    ) -> None:
        self.dtype_policy = DtypePolicy(dtype, keep_fp32)
        save_distributed, self.max_shard_size = checked_layout(
            layout,
            max_shard_size,
            self.dtype_policy,
            naming,
            save_distributed=save_distributed,
            enable_consolidation=enable_consolidation,
            has_mapping=fqn_to_index_mapping is not None,
        )
        super().__init__(
            path=os.fspath(path),
            fqn_to_index_mapping=fqn_to_index_mapping,  # type: ignore[arg-type]  # or a path
            thread_count=thread_count,
            save_distributed=save_distributed,
            enable_consolidation=enable_consolidation,
            thread_count_consolidation=thread_count_consolidation,
        )
        self.naming = naming
        self.extras = extras
        self.overwrite = overwrite
        self.sync_files = sync_files
        self.direct_io = direct_io
        self.strict = strict
        self.allow_pickle = allow_pickle
        self.world_size = world_size
        self.is_coordinator = False
        self._extra_files: list[dict[str, Any]] = []  # coordinator: in staging
        self._last_final: dict[str, Any] | None = None  # coordinator: the tensors of the last save
        self._checked = False  # the plan that is being saved, by prepare_local_plan
        # What torch_ckpt.save knows and DCP does not say: how many ranks save, and the number of
        # this save among those into the directory.
        self._group_size: int | None = None
        self._sequence: int | None = None
        self._part: Part | None = None  # with collectives there are no parts
        self._session: SaveSession | PartSession | None = None
        self._began = 0.0  # when the save that is going on did
        # What torch_ckpt.async_save wants called when this rank has written, or could not.
        self._when_written: Callable[[], None] | None = None
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
        # Process-based async save pickles the writer; these live in one process.
        return {**self.__dict__, "_session": None, "_when_written": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, into `checkpoint_id` where given. Twice with one id is fine."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._place(os.fspath(checkpoint_id))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What `dcp.async_save` saves when it is given no stager: see PinnedMemoryStager."""
        self.per_thread_copy_ahead = 0  # as stock's: it says that there is nothing to copy ahead of
        stager = PinnedMemoryStager()
        return stager.stage(state_dict)  # type: ignore[return-value]  # is no Future

    def _begin_save(self, rank: int, world_size: int) -> None:
        """Called by torch_ckpt.save, after `reset` and before anything can fail."""
        self._group_size = world_size
        self._sequence = next_sequence(str(self.path), rank)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self.rank is None and not is_coordinator:
            raise InvalidArgumentError(
                "the writer was not told its rank: DCP tells a set_up_storage_writer that takes "
                "**kwargs, and one that overrides it has to as well"
            )
        self.is_coordinator = is_coordinator
        self._end_session()
        self._part = None
        if not self.use_collectives:
            check_supported(
                save_distributed=self.save_distributed,
                enable_consolidation=self.enable_consolidation,
                extras=self.extras,
            )
            world_size = self._group_size if self.world_size is None else self.world_size
            sequence, self._sequence = self._sequence, None
            self._part = part_of(str(self.path), self.rank, world_size, sequence)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse here, before anything is on disk, what could not be written."""
        self.fqn_to_index_mapping = checked_mapping(self.fqn_to_index_mapping)
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in RESERVED:
                raise InvalidArgumentError(
                    "this name is reserved for torch_ckpt", tensor=fqn, rank=self.rank
                )
            check_item(item, self.rank)
        check_mapped(plan, self.fqn_to_index_mapping, self.rank)
        # A cached plan comes as an empty one; what it stands for is seen when it is written.
        self._checked = plan.usable
        if self.save_distributed or not plan.usable:
            return plan
        fqns = list(dict.fromkeys(item.index.fqn for item in plan.items))
        return replace(plan, storage_data=RankNote(this_node(), fqns))

    def mapped_names(self) -> frozenset[str]:
        """The tensors that `fqn_to_index_mapping` names."""
        self.fqn_to_index_mapping = checked_mapping(self.fqn_to_index_mapping)
        return frozenset(self.fqn_to_index_mapping or ())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator, and without collectives every rank: lock the staging directory and clear
        what a dead save left."""
        path = str(self.path)
        # A plan that is not usable stands for a cached one: `finish` looks again.
        if all(plan.usable for plan in plans):
            planned = {item.index.fqn for plan in plans for item in plan.items}
            # Names that are tied to others are no items any more.
            self._check_planned(planned.union(*(note_of(plan).fqns for plan in plans)))
            if self.save_distributed and self.dtype_policy:  # it consolidates
                check_castable(plans, self.dtype_policy)
        check_catalog_size(plans)
        if self._part is None:
            tensors = None if self.save_distributed else self._final_tensors(plans)
            if self.save_distributed and self.consolidated_output_path is not None:
                naming = NAMINGS[self.naming]._asdict()
                output = local_path(self.consolidated_output_path)
                _core.call({"op": "check_final", "path": output, **naming})
            shard_ranks = len(plans) if self.save_distributed else 0
            self._session = SaveSession(path, overwrite=self.overwrite, shard_ranks=shard_ranks)
            try:
                self._stage(self._session, tensors)
            except BaseException:
                self._end_session()
                raise
            # Notes are for the coordinator: not back to the ranks.
            return [
                replace(plan, storage_data=None)
                if isinstance(plan.storage_data, RankNote)
                else plan
                for plan in plans
            ]
        try:
            self._session = PartSession(path, self._part.request())
        except (CheckpointError, OSError) as error:
            raise with_rank(error, self._part.rank) from error
        return plans

    def _stage(self, session: SaveSession, tensors: dict[str, Any] | None) -> None:
        """What the coordinator puts into staging before any rank writes."""
        # With shards and final files they stand beside the final ones.
        consolidates = self.save_distributed and self.enable_consolidation
        given = None if consolidates else self.extras
        with extra_files(given, self.dtype_policy.torch_name) as extras:
            self._extra_files = session.stage_extras(extras) if extras else []
        if tensors is None:
            return
        session.stage_final(
            {
                **tensors,
                "mapping": self.fqn_to_index_mapping,
                "max_bytes": self.max_shard_size,
                **NAMINGS[self.naming]._asdict(),
                "sync": self.sync_files,
            }
        )

    def _final_tensors(self, plans: list[SavePlan]) -> dict[str, Any]:
        """What final files are to hold: of these plans, or of those that they stand for."""
        whole = plan_cache.final_plans(plans)
        if whole is not None:
            self._last_final = final_tensors(whole, self.dtype_policy)
        elif self._last_final is None:
            raise ConflictError(
                "stock's planner has cached a plan that another writer has saved by; save with "
                "torch_ckpt.SavePlanner, or reuse the writer, or without enable_plan_caching"
            )
        return self._last_final

    def _check_planned(self, planned: Collection[str]) -> None:
        """Before anything is committed: would final files lack what the mapping names?"""
        final = not self.save_distributed or self.enable_consolidation
        if final and self.strict:
            check_planned(planned, self.fqn_to_index_mapping)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into staging. The future holds one RankReport."""
        try:
            return self._write_plan(plan, planner)
        except BaseException:
            # Final files take their room on the disk from the beginning: the coordinator's failure
            # ends the save at once.
            if not self.save_distributed:
                self._refuse_ring()
                self._end_session()
            raise
        finally:
            if self._when_written is not None:
                self._when_written()

    def _write_plan(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not self._checked:
            check_mapped(plan, self.fqn_to_index_mapping, self.rank)
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
        began = time.perf_counter()
        rank = self.rank or 0
        buckets: dict[int, list[WriteItem]] = {}
        objects: list[WriteItem] = []
        while not file_queue.empty():
            index, _, items = file_queue.get_nowait()
            if index is None:
                objects = items
            else:
                buckets[index] = items
        done: Future[list[WriteResult]] = Future()
        report = RankReport(rank, "", [], [])
        if buckets or objects:
            try:
                staging, report.save_id = self._staging()
                write = RankWrite(
                    planner,
                    staging,
                    report,
                    policy=None if self.save_distributed else self.dtype_policy,
                    file_count=self._file_count(),
                    allow_pickle=self.allow_pickle,
                    options=self._options(),
                )
                write.run(buckets, objects)
            except (CheckpointError, OSError) as error:
                if self._part is not None:
                    self._end_session()  # no coordinator will
                raise with_rank(error, rank) from error
        report.digests = leaf_digests(planner)
        took = time.perf_counter() - began
        report.phases = Phases(
            began - self._began,
            took,
            report.written_bytes,
            ring_bytes=sum(call["ring_bytes"] for call in report.final),
            parts_bytes=sum(call["parts"]["bytes"] for call in report.final if call["parts"]),
        )
        done.set_result([report])  # type: ignore[list-item]
        return done

    def _staging(self) -> tuple[str, str]:
        """The staging directory of the save, and its id."""
        if self._session is not None:
            return self._session.staging, self._session.save_id
        joined = _core.call({"op": "join_save", "path": str(self.path)})
        return joined["staging"], joined["save_id"]

    def _refuse_ring(self) -> None:
        """Tell those who may be waiting for this rank that it does not come; without it they wait
        for a minute."""
        with contextlib.suppress(CheckpointError, OSError):
            staging, _ = self._staging()
            _core.call({"op": "refuse_ring", "staging": staging, "rank": self.rank or 0})

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: commit, then consolidate where that was asked for. Without collectives
        every rank: commit its part."""
        session, self._session = self._session, None
        if session is None:
            raise InvalidArgumentError("finish was called on a writer that has not begun a save")
        try:
            self._check_planned(metadata.state_dict_metadata)
            request = commit_request(
                metadata,
                results,
                session.save_id,
                final=not self.save_distributed,
            )
        except BaseException:
            session.end()
            raise
        reports: list[RankReport] = [report for of_rank in results for report in of_rank]  # type: ignore[misc]
        warn_of_differing_leaves(reports)
        began = time.perf_counter()
        self._commit(session, request)
        if self.save_distributed and self.consolidated_output_path is not None:
            self._consolidate(self.consolidated_output_path)
        took = time.perf_counter() - began
        # DCP brings the metadata to every rank, from a process that saves too; nothing writes them.
        metadata.storage_data = {
            report.rank: replace(report.phases, committed_s=took)
            for report in reports
            if report.phases is not None
        }

    def _consolidate(self, output: str) -> None:
        request = merge_request(
            self.path,
            output,
            self.fqn_to_index_mapping,
            self.thread_count_consolidation,
            strict=self.strict,
            max_shard_size=self.max_shard_size,
            naming=self.naming,
            policy=self.dtype_policy,
            direct_io=self.direct_io,
        )
        merge(request, extra_files(self.extras, self.dtype_policy.torch_name))

    def _commit(self, session: SaveSession | PartSession, request: dict[str, Any]) -> None:
        request["files"] += self._extra_files
        if request["final"] is None:
            session.commit(request)
            return
        # What the ranks have left of final files is put in place first, which may take time.
        with Job() as job:
            whole = {**request, "job": job.id, **self._options()}
            job.run(lambda: session.commit(whole))

    def _options(self) -> dict[str, Any]:
        """How native calls write."""
        return {
            "workers": max(MIN_WORKERS, self.thread_count),
            "sync": self.sync_files,
            "direct_io": self.direct_io,
        }

    def _file_count(self) -> int:
        mapping = self.fqn_to_index_mapping
        return max(mapping.values(), default=1) if mapping else 1

    def _end_session(self) -> None:
        """Give up a save that failed on another rank, of which DCP does not tell the writer."""
        session, self._session = self._session, None
        if session is not None:
            session.end()
