"""Rows: durable saves onto fresh files by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Role, Row, row

Nested = Mapping[str, Any]


def save_with_stock_hf(state: Nested, path: Path) -> None:
    """dcp.save in the Hugging Face format."""
    save(state, storage_writer=HuggingFaceStorageWriter(str(path)), no_dist=True)
    files.make_durable(path)


def save_with_stock_hf_threads(state: Nested, path: Path) -> None:
    """The same into two files by two threads, which takes a mapping."""
    mapping = rivals.split(flatten(state, "."), 2)
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=mapping, thread_count=2)
    save(state, storage_writer=writer, no_dist=True)
    files.make_durable(path)


def save_with_file_system(state: Nested, path: Path, threads: int) -> None:
    """dcp.save in DCP's own format."""
    save(state, storage_writer=FileSystemWriter(path, thread_count=threads), no_dist=True)
    files.make_durable(path)


def save_with_torch(state: Nested, path: Path) -> None:
    """torch.save."""
    path.mkdir()
    torch.save(state, path / "state.pt")
    files.make_durable(path)


def save_with_safetensors(state: states.State, path: Path) -> None:
    """safetensors.torch.save_file."""
    path.mkdir()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    files.make_durable(path)


def save_with_our_writer(state: Nested, path: Path) -> None:
    """dcp.save with our writer: durable when it returns, so nothing is added."""
    writer = rivals.ours("HuggingFaceStorageWriter")(str(path))
    save(state, storage_writer=writer, no_dist=True)


def save_with_our_save(state: Nested, path: Path) -> None:
    """torch_ckpt.save: our planner; durable when it returns."""
    rivals.ours("save")(state, checkpoint_id=str(path), no_dist=True)


def save_with_our_final_layout(state: Nested, path: Path) -> None:
    """The same straight to final files of whole tensors."""
    rivals.ours("save")(state, str(path), layout="final", no_dist=True)


def save_with_our_save_and_stock_planner(state: Nested, path: Path) -> None:
    """torch_ckpt.save with the planner that dcp.save takes when given none."""
    planner = DefaultSavePlanner()
    rivals.ours("save")(state, checkpoint_id=str(path), planner=planner, no_dist=True)


def read_file_system(path: Path, sample: states.State) -> states.State:
    """The sampled tensors from DCP's own format."""
    found = {name: torch.zeros_like(tensor) for name, tensor in sample.items()}
    load(found, storage_reader=FileSystemReader(path), no_dist=True)
    return found


def read_torch(path: Path, separator: str | None) -> states.State:
    """All tensors of a torch.save file, under flat names."""
    loaded = torch.load(path / "state.pt", mmap=True, weights_only=True)
    return loaded if separator is None else flatten(loaded, separator)


def flatten(nested: Nested, separator: str, prefix: str = "") -> states.State:
    """Nested dicts as one dict with joined keys, as DCP names them."""
    flat: states.State = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + key] = value
        else:
            flat.update(flatten(value, separator, f"{prefix}{key}{separator}"))
    return flat


def saver(
    context: Context,
    name: str,
    role: Role,
    save_to: Callable[[Path], None],
    read: Callable[[Path], states.State],
    sample: states.State,
    planner: str = "-",
    nesting: str = "flat",
    skip: str = "",
) -> Contender:
    """A contender that saves to a path that does not exist yet, removed after each run."""
    path = context.directory / "saved"

    def run() -> None:
        save_to(path)

    return Contender(
        name=name,
        role=role,
        run=run,
        check=lambda: states.check_equal(sample, read(path)),
        after=lambda: files.remove(path),
        planner=planner,
        nesting=nesting,
        skip=skip,
    )


def savers(context: Context, flat: states.State, nested: Nested, nesting: str) -> list[Contender]:
    """Every way to save ``nested``; ``flat`` are the same tensors by flat names."""
    sample = states.sample(flat)
    separator = None if nested is flat else "."

    def read_hf(path: Path) -> states.State:
        return rivals.read_safetensors(path, sample)

    def add(name: str, save_to: Callable[[Nested, Path], None], **options: Any) -> Contender:
        options = {"role": "rival", "read": read_hf, "nesting": nesting, **options}
        return saver(
            context, name, save_to=lambda path: save_to(nested, path), sample=sample, **options
        )

    def with_file_system(threads: int) -> Contender:
        return add(
            f"DCP FileSystemWriter, {threads} thread{'s' if threads > 1 else ''}",
            lambda state, path: save_with_file_system(state, path, threads),
            read=lambda path: read_file_system(path, sample),
            planner=rivals.STOCK_PLANNER,
        )

    return [
        add("DCP HF writer", save_with_stock_hf, planner=rivals.STOCK_PLANNER),
        add(
            "DCP HF writer, 2 files, 2 threads",
            save_with_stock_hf_threads,
            planner=rivals.STOCK_PLANNER,
        ),
        with_file_system(2),
        with_file_system(1),
        add("torch.save", save_with_torch, read=lambda path: read_torch(path, separator)),
        add(
            "safetensors save_file",
            lambda _, path: save_with_safetensors(flat, path),
            nesting="flat",
        ),
        add(
            "ours, writer for dcp.save",
            save_with_our_writer,
            role="ours",
            planner=rivals.STOCK_PLANNER,
            skip=rivals.why_not_ours("HuggingFaceStorageWriter"),
        ),
        add(
            "ours, save, stock planner",
            save_with_our_save_and_stock_planner,
            role="ours",
            planner=rivals.STOCK_PLANNER,
            skip=rivals.why_not_ours("save"),
        ),
        add(
            "ours, save",
            save_with_our_save,
            role="ours",
            planner=rivals.OUR_PLANNER,
            skip=rivals.why_not_ours("save"),
        ),
        add(
            "ours, save, final layout",
            save_with_our_final_layout,
            role="ours",
            planner=rivals.OUR_PLANNER,
            skip=rivals.why_not_ours("save"),
        ),
    ]


@row("save_llama")
def save_llama(context: Context) -> Row:
    """The weights of a 1B Llama in bfloat16."""
    shapes = states.llama_1b(context.scale)
    state = states.random_state(shapes, torch.bfloat16)
    size = states.total_bytes(shapes, torch.bfloat16)
    return Row(
        title="Durable save, Llama 1B bfloat16, fresh files",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *savers(context, state, state, "flat"),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
            rivals.write_limit(context, rivals.RECYCLED, "recycled", size),
            rivals.write_limit(context, "buffered write and fdatasync", "buffered", size),
        ],
        limit=rivals.FRESH,
    )


@row("save_experts")
def save_experts(context: Context) -> Row:
    """18,867 tensors of a mixture of experts in bfloat16, mostly of 48 KiB."""
    shapes = states.mixture_of_experts(context.scale)
    state = states.random_state(shapes, torch.bfloat16)
    size = states.total_bytes(shapes, torch.bfloat16)
    return Row(
        title="Durable save, mixture of experts bfloat16, fresh files",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *savers(context, state, state, "flat"),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
    )


@row("save_many")
def save_many(context: Context) -> Row:
    """20,000 tensors of 16 KiB, 20 in each of 1,000 inner dicts."""
    shapes = states.small_tensors(context.scale)
    flat = states.random_state(shapes, torch.float32)
    nested = states.nested(flat)
    size = states.total_bytes(shapes, torch.float32)
    return Row(
        title="Durable save, tensors of 16 KiB in nested dicts, fresh files",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *savers(context, flat, nested, "3 levels"),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
        per_tensor=True,
    )
