"""Rows: loads of many small tensors, where what each costs counts and not its bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks import files, rivals, row_load, row_save, states
from benchmarks.contender import Contender, Context, Role, Row, row

NEEDS = ("save", "load", "LoadPlanner", "HuggingFaceStorageReader")


@row("load_many")
def load_many(context: Context) -> Row:
    """20,000 tensors of 16 KiB, flat and in nested dicts, from the page cache."""
    shapes = states.small_tensors(context.scale)
    plain, halves, native, own = (
        context.directory / name for name in ("plain", "halves", "native", "own")
    )
    state = states.random_state(shapes, torch.float32)
    row_save.save_with_safetensors(state, plain)
    row_save.save_with_stock_hf_threads(state, halves)
    row_save.save_with_file_system(states.nested(state), native, 1)
    sample = states.sample(state)
    skip = rivals.why_not_ours(*NEEDS)
    if not skip:
        row_save.save_with_our_save(states.nested(state), own)
    del state
    target = states.empty_like(shapes, torch.float32)
    nested = states.nested(target)

    def add(
        name: str,
        role: Role,
        load_from: row_load.Loader,
        path: Path,
        planner: str = "-",
        **options: Any,
    ) -> Contender:
        options.setdefault("skip", skip if role == "ours" else "")
        return row_load.loader(
            name, role, load_from, target, sample, path, cold=False, planner=planner, **options
        )

    def close() -> None:
        for path in (plain, halves, native, own):
            if path.exists():
                files.remove(path)

    stock, own_planner = rivals.STOCK_PLANNER, rivals.OUR_PLANNER
    our_reader, our_load = row_load.load_with_our_reader, row_load.load_with_our_load
    inner, two = "DCP FileSystemReader", "DCP HF reader, 2 files, 2 threads"
    others = row_load.OTHER_LOADERS.items()
    return Row(
        title="Load tensors of 16 KiB into existing ones, warm",
        bytes=states.total_bytes(shapes, torch.float32),
        tensors=len(shapes),
        contenders=[
            add("safetensors safe_open and copy_", "rival", row_load.load_with_safe_open, plain),
            add("safetensors load_file and copy_", "rival", row_load.load_with_load_file, plain),
            *(add(name, "rival", do, plain, skip=why) for name, (do, why) in others),
            add("DCP HF reader", "rival", row_load.load_with_stock_hf, plain, stock),
            add(two, "rival", row_load.load_with_stock_hf_threads, halves, stock),
            add(inner, "rival", row_load.load_with_file_system, native, stock, nested=nested),
            add("ours, HF reader, same file", "ours", our_reader, plain, stock),
            add("ours, load, same file", "ours", our_load, plain, own_planner),
            add("ours, load, own files", "ours", our_load, own, own_planner),
            add("ours, load, own files, nested", "ours", our_load, own, own_planner, nested=nested),
            rivals.warm_read_limit(context, 2, files.files_in(plain)),
        ],
        limit=rivals.WARM_READ,
        bound=rivals.READ_BOUND,
        per_tensor=True,
        close=close,
    )


@row("load_partial", memory=("as-is",))
def load_partial(context: Context) -> Row:
    """20,000 tensors are asked for with allow_partial_load, of which the checkpoint has one."""
    shapes = states.small_tensors(context.scale)
    target = states.empty_like(shapes, torch.float32)
    name = next(iter(shapes))
    state = states.random_state({name: shapes[name]}, torch.float32)
    native, own = context.directory / "native", context.directory / "own"
    row_save.save_with_file_system(state, native, 1)
    skip = rivals.why_not_ours(*NEEDS)
    if not skip:
        row_save.save_with_our_save(state, own)

    def with_stock() -> None:
        planner = DefaultLoadPlanner(allow_partial_load=True)
        load(target, storage_reader=FileSystemReader(native), planner=planner, no_dist=True)

    def with_our_reader() -> None:
        reader = rivals.ours("HuggingFaceStorageReader")(str(own))
        planner = rivals.ours("LoadPlanner")(allow_partial_load=True)
        load(target, storage_reader=reader, planner=planner, no_dist=True)

    def with_our_load() -> None:
        planner = rivals.ours("LoadPlanner")(allow_partial_load=True)
        rivals.ours("load")(target, str(own), planner=planner, no_dist=True)

    def add(name: str, role: Role, run: Callable[[], None], planner: str) -> Contender:
        return Contender(
            name=name,
            role=role,
            run=run,
            before=lambda: states.clear(target),
            check=lambda: states.check_equal(state, target),
            planner=planner,
            nesting="flat",
            skip=skip if role == "ours" else "",
        )

    def close() -> None:
        for path in (native, own):
            if path.exists():
                files.remove(path)

    return Row(
        title="Load with allow_partial_load, all tensors but one missing",
        bytes=states.total_bytes(shapes, torch.float32),
        tensors=len(shapes),
        contenders=[
            add("DCP FileSystemReader", "rival", with_stock, rivals.STOCK_PLANNER),
            add("ours, reader for dcp.load", "ours", with_our_reader, rivals.OUR_PLANNER),
            add("ours, load", "ours", with_our_load, rivals.OUR_PLANNER),
        ],
        limit="",
        per_tensor=True,
        close=close,
    )
