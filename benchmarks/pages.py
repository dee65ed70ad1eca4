"""The pages of figures in docs/, and their rows. A page is one run, of half an hour to two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks import environment


@dataclasses.dataclass(frozen=True)
class Page:
    """title: what its rows do. rows: the beginnings of their names."""

    title: str
    rows: tuple[str, ...]


PAGES = {
    "save": Page(
        "saves, and the machine's limits", ("limits", "save_llama", "save_many", "save_experts")
    ),
    "load": Page(
        "loads",
        (
            *("load_cold", "load_warm", "load_many", "load_partial"),
            *("load_metadata", "load_plan", "load_pieces"),
        ),
    ),
    "consolidate": Page("consolidation of shards", ("consolidate_",)),
    "export": Page("from the ranks to Hugging Face files", ("export_",)),
    "async": Page("saves in the background", ("async_llama",)),
    "async_small": Page(
        "saves in the background, of small tensors", ("async_experts", "async_lora")
    ),
    "files": Page(
        "many files, many ranks, first use of memory",
        (
            *("open_", "load_cast", "load_node", "merge_opens", "commit_ranks"),
            *("describe_colliding", "async_first"),
        ),
    ),
    "formats": Page(
        "checkpoints of other formats",
        (
            *("load_distcp_", "reshard_distcp", "metadata_distcp"),
            *("convert_", "diff_formats", "diff_values", "inspect_"),
        ),
    ),
    "cuda": Page("saves and staging from CUDA devices", ("save_cuda", "stage_cuda_")),
}


def path_of(name: str) -> Path:
    """Where the page stands, if it has been measured."""
    return environment.REPOSITORY / "docs" / f"benchmark_results_{name}.md"
