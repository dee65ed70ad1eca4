"""The pages of figures in docs/, and their rows. A page is one run, of half an hour to two."""

from __future__ import annotations

import dataclasses
import re
import subprocess
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
            *("describe_colliding", "async_first", "import_"),
        ),
    ),
    "formats": Page(
        "checkpoints of other formats",
        (
            *("load_distcp_", "reshard_distcp", "metadata_distcp"),
            *("convert_", "diff_formats", "diff_values", "inspect_"),
        ),
    ),
    "training": Page("steps of training runs, and base models", ("train_",)),
    "bases": Page("base models of codes and scales", ("bases_",)),
    "megatron": Page("Megatron Core's dist_checkpointing", ("megatron_",)),
    "cuda": Page("saves from CUDA devices", ("save_cuda",)),
    "cuda_load": Page("loads onto CUDA devices", ("load_cuda_",)),
    "cuda_staging": Page("staging from CUDA devices", ("stage_cuda_",)),
}


COMMIT = re.compile(r"^\| torch_ckpt \| .*commit (\w+)(\+?) \|$", re.MULTILINE)
ENGINE = ("csrc", "torch_ckpt")


def behind(text: str, repository: Path = environment.REPOSITORY) -> str:
    """Why the figures of a page are not of the engine that is here; empty if they are."""
    found = COMMIT.search(text)
    if found is None:
        return "names no commit"
    measured, dirty = found.groups()
    if dirty:
        return f"was measured in a tree that differs from commit {measured}"

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    since = git("rev-list", "--count", f"{measured}..HEAD", "--", *ENGINE)
    if since is None:
        return f"is of commit {measured}, which is not known here"
    return "" if since == "0" else f"is of commit {measured}: {since} have changed the engine since"


def path_of(name: str) -> Path:
    """Where the page stands, if it has been measured."""
    return environment.REPOSITORY / "docs" / f"benchmark_results_{name}.md"
