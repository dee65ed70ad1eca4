"""Rows: loads into existing tensors by one process, from the disk and from the page cache."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks import files, rivals, row_save, states
from benchmarks.contender import Contender, Context, Role, Row, row

Loader = Callable[[states.State, Path], None]


def load_with_stock_hf(state: states.State, path: Path) -> None:
    """dcp.load from the Hugging Face format."""
    load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def load_with_stock_hf_threads(state: states.State, path: Path) -> None:
    """The same by two threads, which take a file each."""
    load(state, storage_reader=HuggingFaceStorageReader(str(path), thread_count=2), no_dist=True)


def load_with_file_system(state: states.State, path: Path) -> None:
    """dcp.load from DCP's own format."""
    load(state, storage_reader=FileSystemReader(path), no_dist=True)


def load_with_safe_open(state: states.State, path: Path, device: str = "cpu") -> None:
    """safe_open, one copy per tensor."""
    with safe_open(path / "model.safetensors", framework="pt", device=device) as file:
        for name, tensor in state.items():
            tensor.copy_(file.get_tensor(name))


def load_with_load_file(state: states.State, path: Path, device: str = "cpu") -> None:
    """load_file, then one copy per tensor."""
    loaded = load_file(path / "model.safetensors", device=device)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def load_with_fastsafetensors(state: states.State, path: Path, device: str = "cpu") -> None:
    """fastsafetensors without GPUDirect, then one copy per tensor."""
    from fastsafetensors import fastsafe_open

    files_ = [str(file) for file in sorted(path.glob("*.safetensors"))]
    with fastsafe_open(files_, nogds=True, device=device) as file:
        for name, tensor in state.items():
            tensor.copy_(file.get_tensor(name))


def load_with_streamer(state: states.State, path: Path) -> None:
    """The run:ai streamer with its own number of threads, one copy per tensor as it comes."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in sorted(path.glob("*.safetensors"))])
        for name, tensor in streamer.get_tensors():
            state[name].copy_(tensor)


def load_with_instanttensor(state: states.State, path: Path) -> None:
    """Never runs: it is in the tables so that nobody looks for it in vain."""
    raise NotImplementedError(ON_DEVICES_ONLY)


ON_DEVICES_ONLY = "instanttensor 0.2.2 loads onto CUDA devices only, see load_cuda_cold"
# Loaders of safetensors files, beside those of the safetensors package.
OTHER_LOADERS: dict[str, tuple[Loader, str]] = {
    "fastsafetensors and copy_": (load_with_fastsafetensors, rivals.why_not("fastsafetensors")),
    "run:ai streamer and copy_": (load_with_streamer, rivals.why_not("runai-model-streamer")),
    "InstantTensor": (load_with_instanttensor, ON_DEVICES_ONLY),
}


def load_with_torch(state: states.State, path: Path) -> None:
    """torch.load over a mapping, then one copy per tensor."""
    loaded = torch.load(path / "state.pt", mmap=True, weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def load_with_our_reader(state: states.State, path: Path) -> None:
    """dcp.load with our reader."""
    reader = rivals.ours("HuggingFaceStorageReader")(str(path))
    load(state, storage_reader=reader, no_dist=True)


def load_with_our_load(state: states.State, path: Path) -> None:
    """torch_ckpt.load: our planner."""
    rivals.ours("load")(state, checkpoint_id=str(path), no_dist=True)


def loader(
    name: str,
    role: Role,
    load_from: Loader,
    target: states.State,
    sample: states.State,
    path: Path,
    *,
    cold: bool,
    planner: str = "-",
    skip: str = "",
    nested: Mapping[str, Any] | None = None,
    write: Callable[[Path], None] | None = None,
) -> Contender:
    """A contender that loads ``path``, made by ``write`` if it is not there, into ``target``.

    ``nested`` are the tensors of ``target`` in nested dicts, which are loaded into instead.
    """

    def before() -> None:
        if write is not None and not path.exists():
            write(path)
        states.clear(target)
        prepare = files.drop_from_memory if cold else files.bring_into_memory
        prepare(files.files_in(path))

    return Contender(
        name=name,
        role=role,
        run=lambda: load_from(target if nested is None else dict(nested), path),
        before=before,
        check=lambda: states.check_equal(sample, target),
        planner=planner,
        nesting="flat" if nested is None else "3 levels",
        skip=skip,
    )


def write_own(scale: float, path: Path) -> None:
    """Saves the row's state by torch_ckpt.save."""
    row_save.save_with_our_save(states.random_state(states.llama_1b(scale), torch.bfloat16), path)


def write_own_elsewhere(scale: float, path: Path) -> None:
    """The same in another process, so that the memory our save keeps is not ready for our load."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(write_own, scale, path).result()


class Inputs(NamedTuple):
    """The same weights, as each package writes what it reads; ``own`` is left to be written."""

    plain: Path
    halves: Path
    native: Path
    zipped: Path
    own: Path

    @classmethod
    def below(cls, directory: Path) -> Inputs:
        """Named in ``directory``, and not there yet."""
        return cls(*(directory / name for name in cls._fields))

    def write(self, shapes: states.Shapes) -> states.State:
        """Writes all but ``own``; returns the tensors to compare."""
        state = states.random_state(shapes, torch.bfloat16)
        row_save.save_with_safetensors(state, self.plain)
        row_save.save_with_stock_hf_threads(state, self.halves)
        row_save.save_with_file_system(state, self.native, 1)
        row_save.save_with_torch(state, self.zipped)
        return states.sample(state)

    def remove(self) -> None:
        """Those that are there."""
        for path in self:
            if path.exists():
                files.remove(path)


def load_row(context: Context, cold: bool) -> Row:
    """Builds both rows: each input is written once, by the package that reads it."""
    shapes = states.llama_1b(context.scale)
    inputs = Inputs.below(context.directory)
    plain, halves, native, zipped, own = inputs
    sample = inputs.write(shapes)
    target = states.empty_like(shapes, torch.bfloat16)

    def add(
        name: str,
        load_from: Loader,
        path: Path,
        planner: str = "-",
        role: Role = "rival",
        skip: str = "",
    ) -> Contender:
        return loader(
            name, role, load_from, target, sample, path, cold=cold, planner=planner, skip=skip
        )

    stock = rivals.STOCK_PLANNER
    skip_reader = rivals.why_not_ours("HuggingFaceStorageReader")
    contenders = [
        add("DCP HF reader", load_with_stock_hf, plain, stock),
        add("DCP HF reader, 2 files, 2 threads", load_with_stock_hf_threads, halves, stock),
        add("DCP FileSystemReader", load_with_file_system, native, stock),
        add("safetensors safe_open and copy_", load_with_safe_open, plain),
        add("safetensors load_file and copy_", load_with_load_file, plain),
        *(add(name, do, plain, skip=why) for name, (do, why) in OTHER_LOADERS.items()),
        add("torch.load(mmap) and copy_", load_with_torch, zipped),
        add("ours, HF reader, same file", load_with_our_reader, plain, stock, "ours", skip_reader),
        loader(
            "ours, load, own files",
            "ours",
            load_with_our_load,
            target,
            sample,
            own,
            cold=cold,
            planner=rivals.OUR_PLANNER,
            skip=rivals.why_not_ours("save", "load"),
            write=lambda path: write_own_elsewhere(context.scale, path),
        ),
    ]
    read = files.files_in(plain)
    if cold:
        contenders.append(rivals.cold_read_limit(context, read))
    else:
        contenders.append(rivals.warm_read_limit(context, 1, read))
        contenders.append(rivals.warm_read_limit(context, 2, read))

    return Row(
        title=f"Load into existing tensors, Llama 1B bfloat16, {'cold' if cold else 'warm'}",
        bytes=states.total_bytes(shapes, torch.bfloat16),
        tensors=len(shapes),
        contenders=contenders,
        limit=rivals.COLD_READ if cold else rivals.WARM_READ,
        bound=rivals.READ_BOUND,
        close=inputs.remove,
    )


@row("load_cold")
def load_cold(context: Context) -> Row:
    """The files are not in memory."""
    return load_row(context, cold=True)


@row("load_warm")
def load_warm(context: Context) -> Row:
    """The files are in the page cache."""
    return load_row(context, cold=False)
