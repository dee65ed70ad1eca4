"""The native calls by which one rank writes its part of a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_ckpt import _ext
from torch_ckpt.dcp.plan.stock_planner import check_written_boxes
from torch_ckpt.dcp.save.commit import RankReport
from torch_ckpt.dcp.save.write_files import (
    TensorColumns,
    collect_objects,
    collect_tensors,
    shard_files,
    tensors_request,
)
from torch_ckpt.dcp.stage.sources import queued_kernels, wait_for
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.jobs import Job


@dataclass
class RankWrite:
    """planner: resolves the items.
    staging: the directory.
    report: what was written is added to it.
    policy: tensors go, in these dtypes, to final files that are there already, whose headers say
        where; None: to shards of this rank.
    file_count: into which mapping indices shards are divided, at most.
    options: "workers", "sync" and "direct_io", as the write op takes them.
    """

    planner: SavePlanner
    staging: str
    report: RankReport
    policy: DtypePolicy | None
    file_count: int
    allow_pickle: bool
    options: dict[str, Any]

    def run(self, buckets: dict[int, list[WriteItem]], objects: list[WriteItem]) -> None:
        """Write the tensors of every mapping index, and the objects."""
        sources: list[torch.Tensor] = []
        files: list[dict[str, Any]] = []
        final = TensorColumns()
        for index, items in buckets.items():
            check_written_boxes(self.planner, items)
            tensors = collect_tensors(self.planner, items)
            if self.policy is None:
                files += shard_files(tensors, index, self.file_count, self.report.rank, sources)
            else:
                final.extend(tensors)
            if tensors.gathered:
                # At most one bucket of copies on the device at a time.
                self._write(files, final, sources)
                del tensors
                sources, files, final = [], [], TensorColumns()
        if objects:
            self.report.objects, object_files = collect_objects(
                self.planner, objects, self.report.rank, sources, allow_pickle=self.allow_pickle
            )
            files += object_files
        if files or final.fqns:
            self._write(files, final, sources)

    def _write(
        self, files: list[dict[str, Any]], final: TensorColumns, sources: list[torch.Tensor]
    ) -> None:
        """Write `files`, and the tensors of `final` into final files, in one call."""
        into_final = None
        if final.fqns and self.policy is not None:
            into_final = tensors_request(final, sources)
            into_final["stored"] = self.policy.stored_dtypes(final.fqns, final.dtypes)
        wait_for(queued_kernels(sources))
        plan = {
            "staging": self.staging,
            "files": files,
            "final": into_final,
            "rank": self.report.rank,
            **self.options,
        }
        with Job() as job:
            result = _ext.write(sources, plan, job)
            self.report.written_bytes += job.progress()[0]
        self.report.files += result["files"]
        if into_final is not None:
            self.report.final.append(result["final"])
