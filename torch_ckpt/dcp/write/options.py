"""The options of a writer: as people give them, and as one save has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch_ckpt.dcp.write.layouts import Layout, Layouts


class WriterOptions(TypedDict, total=False):
    """The keywords of HuggingFaceStorageWriter, but for its path, for editors and type checkers."""

    fqn_to_index_mapping: dict[str, int] | str | os.PathLike[str] | None
    thread_count: int
    save_distributed: bool
    enable_consolidation: bool
    thread_count_consolidation: int
    layout: Literal["sharded", "final"] | None
    max_shard_size: int | str | None
    naming: Literal["dcp", "hf", "diffusers", "peft"]
    dtype: Any
    keep_fp32: Sequence[str]
    extras: Any
    overwrite: bool | Literal["all"]
    sync_files: bool
    direct_io: bool
    strict: bool
    allow_pickle: bool
    world_size: int | None


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What a save takes over from its writer when it begins, under the writer's names: where it
    saves to and which rank this is, and the options, read and checked.

    path: of what ranks write: the shards, or the final files where there are no shards.
    consolidated_output_path, consolidated: of the final files into which the shards are
        consolidated then, where that is asked for: their directory, and their layout.
    rank: None where the writer was not told, as the coordinator's need not be.

    `fqn_to_index_mapping` is not among them: a subclass may make it of the plan.
    """

    path: Path
    consolidated_output_path: str | None
    rank: int | None
    use_collectives: bool
    layouts: Layouts
    consolidated: Layout | None
    overwrite: bool | Literal["all"]
    thread_count: int
    thread_count_consolidation: int
    sync_files: bool
    direct_io: bool
    strict: bool
    allow_pickle: bool
