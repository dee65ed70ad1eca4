"""Rows: loads into tensors on a CUDA device, from the disk and from the page cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Role, Row, row
from benchmarks.row_load import (
    Inputs,
    Loader,
    load_with_fastsafetensors,
    load_with_file_system,
    load_with_load_file,
    load_with_our_load,
    load_with_our_reader,
    load_with_safe_open,
    load_with_stock_hf,
    load_with_stock_hf_threads,
    load_with_streamer,
    load_with_torch,
    loader,
    write_own_elsewhere,
)
from benchmarks.row_save_cuda import NO_DEVICE

DEVICE = "cuda:0"
COPY = "one copy from page-locked memory"


def load_with_instanttensor(state: states.State, path: Path) -> None:
    """InstantTensor lends a ring of device memory, from which each tensor is copied as it comes."""
    import instanttensor

    files_ = [str(file) for file in sorted(path.glob("*.safetensors"))]
    with instanttensor.safe_open(files_, framework="pt", device=DEVICE, copy=False) as file:
        for name, tensor in file.tensors():
            state[name].copy_(tensor)


def on_device(load_from: Callable[..., None]) -> Loader:
    """One that reads for a device which it is told."""
    return functools.partial(load_from, device=DEVICE)


def waited_for(load_from: Loader) -> Loader:
    """Until the bytes are on the device."""

    def load(state: states.State, path: Path) -> None:
        load_from(state, path)
        torch.cuda.synchronize()

    return load


def device_row(context: Context, *, cold: bool) -> Row:
    """Builds both rows, as :func:`benchmarks.row_load.load_row` builds those of host memory."""
    skip = "" if torch.cuda.is_available() else NO_DEVICE
    shapes = states.llama_1b(context.scale)
    size = states.total_bytes(shapes, torch.bfloat16)
    inputs = Inputs.below(context.directory)
    plain, halves, native, zipped, own = inputs
    sample: states.State = {}
    target: states.State = {}
    if not skip:
        sample = {name: each.to(DEVICE) for name, each in inputs.write(shapes).items()}
        target = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
            for name, shape in shapes.items()
        }

    def add(
        name: str,
        load_from: Loader,
        path: Path,
        planner: str = "-",
        role: Role = "rival",
        missing: str = "",
    ) -> Contender:
        return loader(
            name,
            role,
            waited_for(load_from),
            target,
            sample,
            path,
            cold=cold,
            planner=planner,
            skip=skip or missing,
            write=functools.partial(write_own_elsewhere, context.scale) if path == own else None,
        )

    @functools.cache
    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        return host, torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def made() -> None:
        buffers()

    def one_copy() -> None:
        host, device = buffers()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    stock = rivals.STOCK_PLANNER
    limits: list[Contender] = []
    if not skip:
        read = files.files_in(plain)
        limits = (
            [rivals.cold_read_limit(context, read)]
            if cold
            else [rivals.warm_read_limit(context, threads, read) for threads in (1, 2)]
        )
    copy = Contender(name=COPY, role="limit", before=made, run=one_copy, skip=skip)
    none = rivals.why_not
    contenders = [
        add("DCP HF reader", load_with_stock_hf, plain, stock),
        add("DCP HF reader, 2 files, 2 threads", load_with_stock_hf_threads, halves, stock),
        add("DCP FileSystemReader", load_with_file_system, native, stock),
        add("safetensors safe_open and copy_", on_device(load_with_safe_open), plain),
        add("safetensors load_file and copy_", on_device(load_with_load_file), plain),
        add(
            "fastsafetensors and copy_",
            on_device(load_with_fastsafetensors),
            plain,
            missing=none("fastsafetensors"),
        ),
        add(
            "run:ai streamer and copy_",
            load_with_streamer,
            plain,
            missing=none("runai-model-streamer"),
        ),
        add(
            "InstantTensor and copy_",
            load_with_instanttensor,
            plain,
            missing=none("instanttensor"),
        ),
        add("torch.load(mmap) and copy_", load_with_torch, zipped),
        add(
            "ours, HF reader, same file",
            load_with_our_reader,
            plain,
            stock,
            "ours",
            rivals.why_not_ours("HuggingFaceStorageReader"),
        ),
        add(
            "ours, load, own files",
            load_with_our_load,
            own,
            rivals.OUR_PLANNER,
            "ours",
            rivals.why_not_ours("save", "load"),
        ),
        *limits,
        copy,
    ]

    return Row(
        title=f"Load into CUDA tensors, Llama 1B bfloat16, {'cold' if cold else 'warm'}",
        bytes=size,
        tensors=len(shapes),
        contenders=contenders,
        limit=copy.name if skip or not cold else rivals.COLD_READ,
        bound=rivals.READ_BOUND,
        close=inputs.remove,
    )


# See save_cuda.
@row("load_cuda_cold", ("as-is",))
def load_cuda_cold(context: Context) -> Row:
    """The files are not in memory."""
    return device_row(context, cold=True)


@row("load_cuda_warm", ("as-is",))
def load_cuda_warm(context: Context) -> Row:
    """The files are in the page cache."""
    return device_row(context, cold=False)
