"""What the coordinator makes of all ranks' reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.checkpoint.names import OBJECT_FILE
from torch_ckpt.dcp.write.layouts import Layouts
from torch_ckpt.errors import ConflictError, InvalidArgumentError
from torch_ckpt.native.core import names_text
from torch_ckpt.planning.digests import Digest, differences, warn_of
from torch_ckpt.planning.reserved import STRUCTURE_FQN, TIES_KEY


@dataclass(slots=True, kw_only=True)
class Phases:
    """What one rank's part of a save took, in seconds, and the bytes that it wrote; None where it
    is not known (yet).

    planned_at: when the save began, in the background of `async_save`, in seconds since 1970.
    planned_s: from then until this rank began to write.
    agreed_s: of these, what followed its own plan: waiting for the plans of others, and for the
        coordinator, which lays out the files.
    written_s, written_bytes: then, this rank's files, durable.
    ring_bytes, spill_bytes: of tensors in final files that are sharded in short rows, what this
        rank had of those that the ranks of its node wrote together, through shared memory, and what
        it left, with the ends of its own rows, for the coordinator to put in place.
    committed_at, committed_s: what the coordinator did after the last rank had written; when it
        began, by its own clock, in seconds since 1970.
    """

    planned_at: float | None = None
    planned_s: float | None = None
    agreed_s: float | None = None
    written_s: float | None = None
    written_bytes: int | None = None
    ring_bytes: int | None = None
    spill_bytes: int | None = None
    committed_at: float | None = None
    committed_s: float | None = None


@dataclass(slots=True)
class RankReport:
    """What one rank has written into staging.

    files: {"staged", "name", "id", "role", "bytes", "crc32c"} each.
    final: what each call of the write op has written of the final files that the coordinator has
        staged, as the op says it.
    objects: fqns of the leaves in its objects file.
    digests, contents: of leaves, see `leaf_digests`, where the planner does not compare them.
    phases: until the files were written; filled in when they are.
    written_bytes: into files of all kinds.
    """

    rank: int
    save_id: str
    files: list[dict[str, Any]]
    objects: list[str]
    final: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[str, Digest] = field(default_factory=dict)
    contents: dict[str, Digest] = field(default_factory=dict)
    phases: Phases | None = None
    written_bytes: int = 0


def commit_request(
    metadata: Metadata,
    results: list[list[Any]],
    save_id: str,
    layouts: Layouts,
) -> dict[str, Any]:
    """The request that commits `results`, one list per rank (csrc/engine/commit/commit.h).

    Raises ConflictError when a rank wrote for another save than `save_id`.
    """
    reports = [report for of_rank in results for report in of_rank]
    files: list[dict[str, Any]] = []
    objects = []
    finals = []
    for report in reports:
        if not isinstance(report, RankReport):
            raise InvalidArgumentError(
                f"a rank's write result is a {type(report).__name__}, not what write_data returned"
            )
        if report.save_id != save_id:
            raise ConflictError(
                "found another save at its path than the coordinator's: every rank must see the "
                "same file system under this path",
                rank=report.rank,
            )
        files += report.files
        if layouts.final is not None:
            finals.append({"rank": report.rank, "calls": report.final})
        file = layouts.of_objects.path(OBJECT_FILE.format(report.rank + 1))
        objects += [{"name": name, "file": file} for name in report.objects]
    return {
        "world_size": len(results),
        "files": files,
        "objects": objects,
        **planned_entries(metadata),
        "final": None if layouts.final is None else finals,
        "aliases": (metadata.planner_data or {}).get(TIES_KEY),
    }


def planned_entries(metadata: Metadata) -> dict[str, Any]:
    """The leaves that ranks were to write, which the commit looks for, and where they stand in the
    state dict: {"planned": their fqns as `names_text`; "split": of each "1" if its path is what it
    says when it is cut at the dots, else "0"; "paths": {fqn: path} of those where it is neither
    that nor just (fqn,)}.
    """
    known = metadata.planner_data or {}
    planned = list(metadata.state_dict_metadata)
    if STRUCTURE_FQN in known:
        planned.append(STRUCTURE_FQN)
    split = []
    paths = {}
    for fqn in planned:
        path = known.get(fqn)
        if type(path) is not tuple or (len(path) == 1 and path[0] == fqn):
            split.append("0")
        elif _is_split(path, fqn):
            split.append("1")
        else:
            split.append("0")
            paths[fqn] = path
    return {"planned": names_text(planned), "split": "".join(split), "paths": paths}


def _is_split(path: tuple[str | int, ...], fqn: str) -> bool:
    """Whether `path` is `fqn` cut at its dots."""
    try:
        return ".".join(path) == fqn and len(path) == fqn.count(".") + 1  # type: ignore[arg-type]
    except TypeError:  # a number, as places in lists are
        return False


def warn_of_differing_leaves(reports: list[RankReport]) -> None:
    """Log one warning for the leaves that differ between ranks, where the planner has not."""
    by_rank = sorted(reports, key=lambda report: report.rank)
    # Where the kinds of two tensors differ, what is in them does as well.
    differing = {
        **differences([report.contents for report in by_rank]),
        **differences([report.digests for report in by_rank]),
    }
    written = {fqn: report.rank for report in reports for fqn in report.objects}
    writers = {written.get(fqn) for fqn in differing}
    (writer,) = writers if len(writers) == 1 else (None,)
    warn_of(
        differing,
        "one rank's" if writer is None else f"rank {writer}'s",
        "Use torch_ckpt.SavePlanner, and torch_ckpt.PerRank for what is each rank's own, to keep "
        "all",
    )
