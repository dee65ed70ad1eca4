"""Rows: directories that stock DCP wrote, read by stock's own reader and by ours."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from benchmarks import files, rivals, row_load, row_save, states
from benchmarks.contender import Contender, Context, Figure, Role, Row, row
from benchmarks.program import Timing

ITEM = 4096  # bytes of an archive, in the directory whose metadata is read alone


def load_row(context: Context, cold: bool) -> Row:
    """One directory of .distcp files for all."""
    shapes = states.llama_1b(context.scale)
    path = context.directory / "distcp"
    state = states.random_state(shapes, torch.bfloat16)
    row_save.save_with_file_system(state, path, 1)
    sample = states.sample(state)
    del state
    target = states.empty_like(shapes, torch.bfloat16)

    def add(name: str, role: Role, load: row_load.Loader, planner: str, *needs: str) -> Contender:
        return row_load.loader(
            name,
            role,
            load,
            target,
            sample,
            path,
            cold=cold,
            planner=planner,
            skip=rivals.why_not_ours(*needs) if needs else "",
        )

    stock, ours = rivals.STOCK_PLANNER, rivals.OUR_PLANNER
    reader = "HuggingFaceStorageReader"
    inputs = files.files_in(path)
    contenders = [
        add("DCP FileSystemReader", "rival", row_load.load_with_file_system, stock),
        add("ours, dcp.load", "ours", row_load.load_with_our_reader, stock, reader),
        add("ours, load", "ours", row_load.load_with_our_load, ours, "load"),
        rivals.cold_read_limit(context, inputs)
        if cold
        else rivals.warm_read_limit(context, 2, inputs),
    ]
    return Row(
        title=f"Load what stock DCP wrote, Llama 1B bfloat16, {'cold' if cold else 'warm'}",
        bytes=states.total_bytes(shapes, torch.bfloat16),
        tensors=len(shapes),
        contenders=contenders,
        limit=rivals.COLD_READ if cold else rivals.WARM_READ,
        bound=rivals.READ_BOUND,
        close=lambda: files.empty(context.directory),
    )


@row("load_distcp_cold")
def load_distcp_cold(context: Context) -> Row:
    """The files are not in memory."""
    return load_row(context, cold=True)


@row("load_distcp_warm")
def load_distcp_warm(context: Context) -> Row:
    """The files are in the page cache."""
    return load_row(context, cold=False)


def metadata_of(tensors: int, ranks: int) -> dcp.Metadata:
    """What stock writes of `tensors` that each of `ranks` has some rows of, rank by rank."""
    state: dict[str, dcp.STORAGE_TYPES] = {}
    for tensor in range(tensors):
        state[f"model.layers.{tensor // 10}.mlp.experts.{tensor % 10}.weight"] = (
            dcp.TensorStorageMetadata(
                dcp.TensorProperties(torch.bfloat16),
                torch.Size([4 * ranks, 128]),
                [
                    dcp.ChunkStorageMetadata(torch.Size([4 * rank, 0]), torch.Size([4, 128]))
                    for rank in range(ranks)
                ],
            )
        )
    storage = {
        # Ranks send their indexes and places: each index has a name of its own, and a rank's places
        # share that of their file.
        dcp.MetadataIndex("".join(name), torch.Size([4 * rank, 0]), rank): _StorageInfo(
            path, at * ITEM, ITEM
        )
        for rank, path in enumerate([f"__{rank}_0.distcp" for rank in range(ranks)])
        for at, name in enumerate(state)
    }
    return dcp.Metadata(state, {name: tuple(name.split(".")) for name in state}, storage)


@row("metadata_distcp", memory=("as-is",))
def metadata_distcp(context: Context) -> Row:
    """10,000 tensors of 256 ranks: what there is to do before anything is read."""
    tensors, ranks = max(10, int(10_000 * context.scale)), 256
    path = context.directory / "distcp"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(metadata_of(tensors, ranks)))
    for rank in range(ranks):
        with (path / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(tensors * ITEM)

    def add(name: str, role: Role, read: Callable[[], dcp.Metadata]) -> Contender:
        found: list[int] = []

        def run() -> Timing:
            cpu, start = time.process_time(), time.perf_counter()
            metadata = read()
            seconds = time.perf_counter() - start
            cpu = time.process_time() - cpu
            found[:] = [len(metadata.state_dict_metadata)]
            return Timing(seconds, cpu, tensors, figures={"seconds": seconds})

        def check() -> None:
            if found != [tensors]:
                raise ValueError(f"{found} tensors instead of {tensors}")

        return Contender(
            name=name,
            role=role,
            before=lambda: files.bring_into_memory([path / ".metadata"]),
            run=run,
            check=check,
            skip=rivals.why_not_ours("HuggingFaceStorageReader") if role == "ours" else "",
        )

    size = (path / ".metadata").stat().st_size
    return Row(
        title=f"Metadata of stock DCP, {tensors:,} tensors of {ranks} ranks, {size / 1e6:.0f} MB",
        bytes=size,
        tensors=tensors,
        contenders=[
            add("DCP FileSystemReader", "rival", lambda: FileSystemReader(path).read_metadata()),
            add(
                "ours, reader",
                "ours",
                lambda: rivals.ours("HuggingFaceStorageReader")(str(path)).read_metadata(),
            ),
        ],
        limit="",
        figures=(Figure("seconds", "s", worst=True, compared=False),),
        close=lambda: files.empty(context.directory),
    )
