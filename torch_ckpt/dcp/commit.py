"""What the coordinator makes of all ranks' reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._core import names_text
from torch_ckpt.dcp.reserved import STRUCTURE_FQN
from torch_ckpt.errors import ConflictError, InvalidArgumentError


@dataclass(slots=True)
class Phases:
    """What one rank's part of a save took, in seconds, and the bytes that it wrote."""

    planned_s: float
    written_s: float
    written_bytes: int
    committed_s: float = 0.0  # by the coordinator, for all


@dataclass(slots=True)
class RankReport:
    """What one rank has written into staging.

    files: {"staged", "name", "id", "role", "bytes", "crc32c", "group"} each.
    objects: fqns of the leaves in its objects file.
    digests: of the leaves that are no tensors, where the planner does not compare them.
    phases: until the files were written; filled in when they are.
    """

    rank: int
    save_id: str
    files: list[dict[str, Any]]
    objects: list[str]
    digests: dict[str, bytes] = field(default_factory=dict)
    phases: Phases | None = None


def commit_request(
    metadata: Metadata,
    results: list[list[Any]],
    save_id: str,
    *,
    distributed: bool,
    file_count: int,
) -> dict[str, Any]:
    """The request that commits `results`, one list per rank (csrc/engine/commit.h).

    `file_count` is the number of final files that the mapping asks for. Raises ConflictError when
    a rank wrote for another save than `save_id`.
    """
    reports = [report for of_rank in results for report in of_rank]
    files: list[dict[str, Any]] = []
    groups: list[tuple[int, int, dict[str, Any]]] = []
    objects = []
    for report in reports:
        if not isinstance(report, RankReport):
            raise InvalidArgumentError(
                f"a rank's write result is a {type(report).__name__}, not what write_data returned"
            )
        if report.files and report.save_id != save_id:
            raise ConflictError("wrote for another save into the same directory", rank=report.rank)
        for file in report.files:
            group = file.pop("group", None)
            if group is None:
                files.append(file)
            else:
                groups.append((group, report.rank, file))
        objects += [
            {"name": name, "file": f"objects-{report.rank + 1:05}.json"} for name in report.objects
        ]
    # Final files hold whole tensors, so each rank that has some of an index writes its own file.
    # Where only one does (rank 0, as a rule) the numbers are those of the mapping.
    groups.sort(key=lambda group: group[:2])
    plain = len({index for index, _, _ in groups}) == len(groups)
    count = file_count if plain else len(groups)
    for number, (index, _, file) in enumerate(groups, start=1):
        file["name"] = f"model-{index if plain else number:05}-of-{count:05}.safetensors"
        files.append(file)
    return {
        "world_size": len(results),
        "files": files,
        "objects": objects,
        **planned_entries(metadata),
        "index": not distributed,
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
