"""Rows: sharded checkpoints into Hugging Face files, durable, from shards in the page cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.shards import write_shards

FileNumbers = dict[str, int]


def consolidate_with_stock(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """torch.distributed.checkpoint's function; its output is not synced, so that is added."""
    consolidate_safetensors_files(str(source), str(target), mapping, threads)
    files.make_durable(target)


def consolidate_with_ours(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """Our function: durable when it returns."""
    rivals.ours("consolidate_safetensors_files")(str(source), str(target), mapping, threads)


def split_by_bytes(state: Mapping[str, torch.Tensor], count: int) -> FileNumbers:
    """Output file numbers from 1: consecutive tensors, about the same bytes in each file."""
    total = sum(tensor.nbytes for tensor in state.values())
    mapping: FileNumbers = {}
    done = 0
    for name, tensor in state.items():
        mapping[name] = min(count, 1 + done * count // total)
        done += tensor.nbytes
    return mapping


def consolidate_row(
    context: Context,
    what: str,
    shapes: states.Shapes,
    world: int,
    dim: int = 0,
    gather_run: int | None = None,
) -> Row:
    """Builds a row: the shards are written once, each contender merges them anew."""
    source, target = context.directory / "sharded", context.directory / "merged"
    state = states.random_state(shapes, torch.bfloat16)
    size = states.total_bytes(shapes, torch.bfloat16)
    write_shards(state, source, world, dim)
    files.make_durable(source)
    sample = states.sample(state)
    mappings = {threads: split_by_bytes(state, threads) for threads in (1, 2)}
    del state
    skip = rivals.why_not_ours("consolidate_safetensors_files")

    def before() -> None:
        target.mkdir()
        files.bring_into_memory(files.files_in(source))

    def add(
        who: str, merge: Callable[[Path, Path, FileNumbers, int], None], threads: int
    ) -> Contender:
        plural = "s" if threads > 1 else ""
        return Contender(
            name=f"{who}, {threads} thread{plural}, {threads} file{plural}",
            role="ours" if merge is consolidate_with_ours else "rival",
            run=lambda: merge(source, target, mappings[threads], threads),
            before=before,
            check=lambda: states.check_equal(sample, rivals.read_safetensors(target, sample)),
            after=lambda: files.remove(target),
            skip=skip if merge is consolidate_with_ours else "",
        )

    contenders = [
        add("DCP consolidate", consolidate_with_stock, 1),
        add("DCP consolidate", consolidate_with_stock, 2),
        add("ours", consolidate_with_ours, 1),
        add("ours", consolidate_with_ours, 2),
        rivals.write_limit(context, rivals.FRESH, "direct", size),
    ]
    if gather_run is not None:
        contenders.append(
            rivals.limit(
                f"gather {gather_run} B in memory",
                lambda: context.program.time("gather", size, gather_run),
            )
        )
    return Row(
        title=f"Consolidate {what}, durable, warm input",
        bytes=size,
        tensors=len(shapes),
        contenders=contenders,
        limit=rivals.FRESH,
        close=lambda: files.remove(source),
    )


@row("consolidate_rows_2")
def consolidate_rows_2(context: Context) -> Row:
    """Row shards of 2 ranks."""
    return consolidate_row(context, "Llama 1B, Shard(0) x 2", states.llama_1b(context.scale), 2)


@row("consolidate_rows_8")
def consolidate_rows_8(context: Context) -> Row:
    """Row shards of 8 ranks."""
    return consolidate_row(context, "Llama 1B, Shard(0) x 8", states.llama_1b(context.scale), 8)


def columns(context: Context, run: int) -> Row:
    """16 matrices of 32 MiB, cut into 8 column shards whose rows are ``run`` bytes long."""
    width = 8 * run // torch.bfloat16.itemsize
    height = states.scaled((32 << 20) // (8 * run), context.scale)
    shapes: states.Shapes = {f"model.layers.{i}.weight": (height, width) for i in range(16)}
    what = f"16 matrices, Shard(1) x 8, runs of {run} B"
    return consolidate_row(context, what, shapes, 8, dim=1, gather_run=run)


@row("consolidate_columns_256")
def consolidate_columns_256(context: Context) -> Row:
    """Column shards with runs of 256 B."""
    return columns(context, 256)


@row("consolidate_columns_1024")
def consolidate_columns_1024(context: Context) -> Row:
    """Column shards with runs of 1 KiB."""
    return columns(context, 1024)


@row("consolidate_columns_4096")
def consolidate_columns_4096(context: Context) -> Row:
    """Column shards with runs of 4 KiB."""
    return columns(context, 4096)


@row("consolidate_many")
def consolidate_many(context: Context) -> Row:
    """18,867 tensors, row shards of 8 ranks."""
    shapes = states.mixture_of_experts(context.scale)
    return consolidate_row(context, "mixture of experts, Shard(0) x 8", shapes, 8)
