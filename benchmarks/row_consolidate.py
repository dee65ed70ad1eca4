"""Rows: sharded checkpoints into Hugging Face files, durable, from shards in the page cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.shards import write_shards

FileNumbers = dict[str, int]
Merge = Callable[[Path, Path, FileNumbers, int], None]


def consolidate_with_stock(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """torch.distributed.checkpoint's function; its output is not synced, so that is added."""
    consolidate_safetensors_files(str(source), str(target), mapping, threads)
    files.make_durable(target)


def consolidate_with_ours(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """Our function: durable when it returns."""
    rivals.ours("consolidate_safetensors_files")(str(source), str(target), mapping, threads)


def cast_with_stock(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """Stock's consolidation casts nothing: its files are loaded, cast, and written once more."""
    consolidate_safetensors_files(str(source), str(target), mapping, threads)
    for path in files.files_in(target):
        if path.suffix == ".safetensors":
            tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
            path.unlink()
            save_file(tensors, path, metadata={"format": "pt"})
    files.make_durable(target)


def cast_with_ours(source: Path, target: Path, mapping: FileNumbers, threads: int) -> None:
    """Cast while it is merged."""
    merge = rivals.ours("consolidate_safetensors_files")
    merge(str(source), str(target), mapping, threads, dtype="bf16")


def split_by_bytes(state: Mapping[str, torch.Tensor], count: int) -> FileNumbers:
    """Output file numbers from 1: consecutive tensors, about the same bytes in each file."""
    total = sum(tensor.nbytes for tensor in state.values())
    mapping: FileNumbers = {}
    done = 0
    for name, tensor in state.items():
        mapping[name] = min(count, 1 + done * count // total)
        done += tensor.nbytes
    return mapping


def counted(count: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {what}{'s' if count > 1 else ''}"


def consolidate_row(
    context: Context,
    what: str,
    shapes: states.Shapes,
    world: int,
    dim: int = 0,
    gather_run: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """Builds a row: the shards are written once, in `dtype`, each contender merges them anew, to
    bfloat16."""
    source, target = context.directory / "sharded", context.directory / "merged"
    state = states.random_state(shapes, dtype)
    if dtype != torch.bfloat16:
        # torch casts NaNs to one code or another, as vectors or as scalars, and ours refuses what
        # bfloat16 has no number for.
        for tensor in state.values():
            tensor.nan_to_num_().clamp_(-3e38, 3e38)
    size = states.total_bytes(shapes, torch.bfloat16)
    write_shards(state, source, world, dim)
    files.make_durable(source)
    sample = {name: tensor.bfloat16() for name, tensor in states.sample(state).items()}
    mappings = {threads: split_by_bytes(state, threads) for threads in (1, 2)}
    del state
    skip = rivals.why_not_ours("consolidate_safetensors_files")

    def before() -> None:
        target.mkdir()
        files.bring_into_memory(files.files_in(source))

    def add(who: str, merge: Merge, threads: int) -> Contender:
        ours = who == "ours"
        # Ours runs four threads at the least, and says so.
        running = max(threads, rivals.our_least_workers()) if ours else threads
        return Contender(
            name=f"{who}, {counted(running, 'thread')}, {counted(threads, 'file')}",
            role="ours" if ours else "rival",
            run=lambda: merge(source, target, mappings[threads], threads),
            before=before,
            check=lambda: states.check_equal(sample, rivals.read_safetensors(target, sample)),
            after=lambda: files.remove(target),
            skip=skip if ours else "",
        )

    stock, merge = "DCP consolidate", consolidate_with_ours
    stock_merge = consolidate_with_stock
    if dtype != torch.bfloat16:
        stock, merge = "DCP consolidate, then cast", cast_with_ours
        stock_merge = cast_with_stock
    contenders = [
        *(add(stock, stock_merge, threads) for threads in (1, 2)),
        *(add("ours", merge, threads) for threads in (1, 2)),
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


@row("consolidate_columns_cast")
def consolidate_columns_cast(context: Context) -> Row:
    """Column shards in float32, with runs of 1 KiB, cast to bfloat16. Bytes are those written."""
    height = states.scaled((32 << 20) // 4096, context.scale)
    shapes: states.Shapes = {f"model.layers.{i}.weight": (height, 2048) for i in range(16)}
    what = "16 float32 matrices, Shard(1) x 8, runs of 1 KiB, to bfloat16"
    return consolidate_row(context, what, shapes, 8, dim=1, dtype=torch.float32)


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
