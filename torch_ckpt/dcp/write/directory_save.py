"""One save into a directory, as this rank takes part in it.

What travels between ranks is one `RankReport` each, through DCP's own gather of write results.
Nothing that a rank needs is in `storage_data`: with cached plans a rank writes by the plan of an
earlier save. The staging directory is a function of the path, and its `save_id` file tells every
rank which save it is part of.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt.checkpoint.names import SAVE_ID
from torch_ckpt.checkpoint.selection import warn_of_moments
from torch_ckpt.dcp.node import this_node, transfer_workers
from torch_ckpt.dcp.plan import plan_cache
from torch_ckpt.dcp.plan.global_plan import check_catalog_size
from torch_ckpt.dcp.plan.rings import RankNote, note_of
from torch_ckpt.dcp.plan.stock_planner import leaf_digests
from torch_ckpt.dcp.write.commit import (
    Phases,
    RankReport,
    commit_request,
    warn_of_differing_leaves,
)
from torch_ckpt.dcp.write.final_layout import (
    check_castable,
    check_mapped,
    check_planned,
    final_tensors,
)
from torch_ckpt.dcp.write.layouts import Layout
from torch_ckpt.dcp.write.options import SaveOptions
from torch_ckpt.dcp.write.parts import Part, check_supported, part_of
from torch_ckpt.dcp.write.write_files import RankWrite, check_item
from torch_ckpt.errors import (
    CheckpointError,
    ConflictError,
    IncompleteError,
    InvalidArgumentError,
    raise_with_rank,
)
from torch_ckpt.export.extras import extra_files
from torch_ckpt.export.merge import merge, merge_request
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.sessions import PartSession, SaveSession, replaces, warn_of
from torch_ckpt.native.torch_private import stocks_cached_plans
from torch_ckpt.options import local_path
from torch_ckpt.planning.reserved import RESERVED

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def _wall_time(then: float) -> float:
    """A reading of `time.perf_counter`, in seconds since 1970."""
    return time.time() - (time.perf_counter() - then)


class DirectorySave:
    """The steps of one save. Made when it begins."""

    def __init__(
        self,
        options: SaveOptions,
        world_size: int | None,
        sequence: int | None,
        on_written: Callable[[], None] | None,
        began: float,
        metadata: dict[str, str],
    ) -> None:
        """`began`: when the save did, by `time.perf_counter`. `metadata`: for the manifest."""
        self._metadata = metadata
        self._options = options
        self._path = str(options.path)
        self._rank = options.rank or 0
        self._began = self._planned = began
        self._on_written = on_written
        self._checked = False  # the plan that is being saved, by `check`
        self.mapping: dict[str, int] | None = None  # the writer's, of tensors to files, checked
        self._extra_files: list[dict[str, Any]] = []  # coordinator: in staging
        # On every rank, before the coordinator of this save locks the directory: one of another
        # rank, that failed elsewhere or in a writer of the user's, may have been coordinated here.
        SaveSession.end_earlier(self._path)
        self._session: SaveSession | PartSession | None = None
        self._part: Part | None = None  # with collectives there are no parts
        if not options.use_collectives:
            check_supported(options.layouts, options.consolidated)
            self._part = part_of(self._path, options.rank, world_size, sequence)

    def check(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, with a note for the coordinator. Refuses what could not be written."""
        options, rank = self._options, self._options.rank
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in RESERVED:
                raise InvalidArgumentError(
                    "this name is reserved for torch_ckpt", tensor=fqn, rank=rank
                )
            check_item(item, rank)
        check_mapped(plan, self.mapping, rank)
        # A cached plan comes as an empty one; what it stands for is seen when it is written.
        self._checked = plan.usable
        self._planned = time.perf_counter()
        if options.layouts.final is None or not plan.usable:
            return plan
        fqns = list(dict.fromkeys(fqn for fqn, _ in options.layouts.in_final_files(plan)))
        return replace(plan, storage_data=RankNote(this_node(), fqns))

    def lay_out(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator, and without collectives every rank: lock the staging directory, clear what a
        dead save left, and stage what is there before any rank writes."""
        options = self._options
        # A plan that is not usable stands for a cached one: `commit` looks again.
        if all(plan.usable for plan in plans):
            if self.mapping:
                planned = {item.index.fqn for plan in plans for item in plan.items}
                # Names that are tied to others are no items any more.
                self._check_planned(planned.union(*(note_of(plan).fqns for plan in plans)))
            if options.consolidated is not None and options.consolidated.dtype_policy:
                check_castable(plans, options.consolidated.dtype_policy)
        check_catalog_size(plans)
        if self._part is not None:
            try:
                self._session = PartSession(self._path, self._part.request())
            except (CheckpointError, OSError) as error:
                raise_with_rank(error, self._part.rank)
            return plans
        final, sharded = options.layouts.final, options.layouts.sharded
        tensors = None if final is None else self._final_tensors(plans)
        if options.consolidated is not None:
            assert options.consolidated_output_path is not None
            output = local_path(options.consolidated_output_path)
            naming = options.consolidated.naming_request()
            request = {"op": "check_final", "path": output, **naming, **replaces(options.overwrite)}
            warn_of(core.call(request))
        if final is not None and tensors is not None and final.naming != "dcp":
            warn_of_moments(
                self._path,
                core.listed_names(tensors["names"]),
                "save weights and optimizer into directories of their own",
            )
        session = SaveSession(
            self._path,
            overwrite=options.overwrite,
            shard_ranks=0 if sharded is None else len(plans),
            shards_in="" if sharded is None else sharded.subdirectory,
        )
        self._session = session
        try:
            self._stage(session, tensors)
        except BaseException:
            self.end()
            raise
        # Notes are for the coordinator: not back to the ranks.
        return [
            replace(plan, storage_data=None) if isinstance(plan.storage_data, RankNote) else plan
            for plan in plans
        ]

    def begun_part(self) -> tuple[str, str]:
        """The name of this rank's staging directory, and what the file `save_id` in it says: ranks
        that see it have one directory under the path."""
        assert isinstance(self._session, PartSession)
        staging, save_id = self._session.staging, self._session.save_id
        with open(os.path.join(staging, SAVE_ID), "w", encoding="ascii") as file:
            file.write(save_id)
        return os.path.basename(staging), save_id

    def check_place(self, first: tuple[str, str]) -> None:
        """Raises IncompleteError where `first`, rank 0's `begun_part`, is not seen in time."""
        staging, save_id = first
        until = time.monotonic() + _PATIENCE_S
        while self._seen(staging) != save_id:
            if time.monotonic() > until:
                raise IncompleteError(
                    "what rank 0 has begun to save cannot be seen here: every rank must see the "
                    "same file system under this path",
                    file=self._path,
                    rank=self._rank,
                )
            time.sleep(0.05)  # the caches of a shared file system are late

    def _seen(self, staging: str) -> str | None:
        try:
            with open(os.path.join(self._path, staging, SAVE_ID), encoding="ascii") as file:
                return file.read()
        except OSError:
            return None

    def _stage(self, session: SaveSession, tensors: dict[str, Any] | None) -> None:
        options = self._options
        # The extras of what is consolidated stand beside the final files.
        for layout in options.layouts:
            if layout.extras is None:
                continue
            with extra_files(layout.extras, layout.dtype_policy.torch_name) as extras:
                if extras:
                    self._extra_files += session.stage_extras(extras, layout.subdirectory)
        if tensors is None:
            return
        final = options.layouts.main
        session.stage_final(
            {
                **tensors,
                "mapping": self.mapping,
                "max_bytes": final.max_shard_size,
                **final.naming_request(),
                "sync": options.sync_files,
            }
        )

    def _final_tensors(self, plans: list[SavePlan]) -> dict[str, Any]:
        """What final files are to hold: of these plans, or of those that they stand for."""
        whole = plan_cache.final_plans(plans) or stocks_cached_plans(len(plans))
        if whole is None:
            raise ConflictError(
                "planners of several classes have cached plans, and which of them is meant is not "
                "known; save with torch_ckpt.SavePlanner, or without enable_plan_caching"
            )
        return final_tensors(whole, self._options.layouts)

    def _check_planned(self, planned: Collection[str]) -> None:
        """Before anything is committed: would final files lack what the mapping names?"""
        options = self._options
        final = options.layouts.final or options.consolidated
        if final is not None and options.strict:
            check_planned(planned, self.mapping)

    def write(self, plan: SavePlan, write: Callable[[], T]) -> T:
        """What `write` returns, which calls `write_items` with what is in `plan`."""
        try:
            if not self._checked:
                check_mapped(plan, self.mapping, self._options.rank)
            return write()
        except BaseException:
            # Final files take their room on the disk from the beginning: the coordinator's failure
            # ends the save at once.
            if self._options.layouts.final is not None:
                self._refuse_ring()
                self.end()
            raise
        finally:
            if self._on_written is not None:
                self._on_written()

    def write_items(
        self,
        planner: SavePlanner,
        buckets: dict[int, list[WriteItem]],
        objects: list[WriteItem],
    ) -> RankReport:
        """Write the tensors of every mapping index, and the objects, into staging."""
        options, rank = self._options, self._rank
        began = time.perf_counter()
        report = RankReport(rank, "", [], [])
        try:
            # Also without anything to write: a rank that has another place must not return from a
            # save which it cannot load.
            staging, report.save_id = self._staging()
            if buckets or objects:
                write = RankWrite(
                    planner,
                    staging,
                    report,
                    layouts=options.layouts,
                    file_count=self._file_count(),
                    allow_pickle=options.allow_pickle,
                    options=self._how(),
                )
                write.run(buckets, objects)
        except (CheckpointError, OSError) as error:
            if self._part is not None:
                self.end()  # no coordinator will
            raise_with_rank(error, rank)
        report.digests, report.contents = leaf_digests(planner)
        report.phases = Phases(
            planned_at=_wall_time(self._began),
            planned_s=began - self._began,
            agreed_s=began - self._planned,
            written_s=time.perf_counter() - began,
            written_bytes=report.written_bytes,
            ring_bytes=sum(call["ring_bytes"] for call in report.final),
            spill_bytes=sum(call["spill"]["bytes"] for call in report.final if call["spill"]),
        )
        return report

    def _staging(self) -> tuple[str, str]:
        """The staging directory of the save, and its id."""
        if self._session is not None:
            return self._session.staging, self._session.save_id
        joined = core.call({"op": "join_save", "path": self._path})
        return joined["staging"], joined["save_id"]

    def _refuse_ring(self) -> None:
        """Tell those who may be waiting for this rank that it does not come; without it they wait
        for a minute."""
        with contextlib.suppress(CheckpointError, OSError):
            staging, _ = self._staging()
            core.call({"op": "refuse_ring", "staging": staging, "rank": self._rank})

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: commit, then consolidate where that was asked for. Without collectives
        every rank: commit its part."""
        options = self._options
        session, self._session = self._session, None
        if session is None:
            raise InvalidArgumentError("finish was called on a writer that has not begun a save")
        try:
            self._check_planned(metadata.state_dict_metadata)
            request = commit_request(metadata, results, session.save_id, options.layouts)
            reports: list[RankReport] = [report for of_rank in results for report in of_rank]  # type: ignore[misc]
            warn_of_differing_leaves(reports)
            began = time.perf_counter()
            self._commit(session, request)
        except BaseException:
            session.end()  # not when the error is garbage: its frames hold this
            raise
        if options.consolidated is not None and options.consolidated_output_path is not None:
            self._consolidate(options.consolidated_output_path, options.consolidated)
        took, committed_at = time.perf_counter() - began, _wall_time(began)
        # DCP brings the metadata to every rank, from a process that saves too; nothing writes them.
        metadata.storage_data = {
            report.rank: replace(report.phases, committed_at=committed_at, committed_s=took)
            for report in reports
            if report.phases is not None
        }
        written = sum(report.written_bytes for report in reports)
        logger.info(
            "saved %s: %.3f GB in %.2f s, %.2f of them to commit",
            self._path,
            written / 1e9,
            time.perf_counter() - self._began,
            took,
        )

    def _commit(self, session: SaveSession | PartSession, request: dict[str, Any]) -> None:
        request["files"] += self._extra_files
        request["metadata"] = self._metadata
        if request["final"] is None:
            session.commit(request)
            return
        # What the ranks have left of final files is put in place first, which may take time.
        with Job() as job:
            whole = {**request, "job": job.id, **self._how()}
            job.run(lambda: session.commit(whole))

    def _consolidate(self, output: str, layout: Layout) -> None:
        options = self._options
        request = merge_request(
            self._path,
            output,
            self.mapping,
            options.thread_count_consolidation,
            strict=options.strict,
            max_shard_size=layout.max_shard_size,
            naming=layout.naming,
            policy=layout.dtype_policy,
            direct_io=options.direct_io,
            overwrite=options.overwrite,
        )
        merge(request, extra_files(layout.extras, layout.dtype_policy.torch_name))

    def _how(self) -> dict[str, Any]:
        """How native calls write."""
        return {
            "workers": transfer_workers(self._options.thread_count),
            "sync": self._options.sync_files,
            "direct_io": self._options.direct_io,
            # Ranks that know nothing of each other may each have other boxes beside one that both
            # have. Readers know a replica by its box, which therefore stays as it is.
            "join": self._part is None,
        }

    def _file_count(self) -> int:
        return max(self.mapping.values(), default=1) if self.mapping else 1

    def end(self) -> None:
        """Give up what is not committed. Once more is fine."""
        session, self._session = self._session, None
        if session is not None:
            session.end()
