"""Row: what it costs a conversion that stock has saved a tensor in very many chunks."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing

CHUNKS, COLUMNS = 1024, 1 << 16  # of float32: 256 KiB a row
NAME = "weight"
FIGURES = (
    Figure("cpu_ms", "CPU ms", worst=True),
    Figure("times", "times the CPU of one chunk", worst=True),
    Figure("milliseconds", "ms", worst=True),
)


class _Chunks(DefaultSavePlanner):
    """Saves the tensor in chunks of a row each, as so many ranks do."""

    def create_local_plan(self) -> SavePlan:
        whole: torch.Tensor = self.state_dict[NAME]
        items = []
        for at in range(whole.shape[0]):
            offsets = torch.Size([at, 0])
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, torch.Size([1, whole.shape[1]])),
                properties=TensorProperties(dtype=whole.dtype),
                size=whole.shape,
            )
            index = MetadataIndex(NAME, offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert index.offset is not None
        return self.state_dict[NAME][index.offset[0] : index.offset[0] + 1]


def convert_timed(source: Path, target: Path, size: int) -> Timing:
    """Our conversion to a Hugging Face directory, with the CPU of this process."""
    usage, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    rivals.ours("convert")(source, target, "hf")
    seconds = time.perf_counter() - start
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu = ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime
    figures = {"cpu_ms": cpu * 1e3, "milliseconds": seconds * 1e3}
    return Timing(seconds, cpu, size, figures=figures)


@row("convert_chunks", memory=("as-is",))
def convert_chunks(context: Context) -> Row:
    """256 MiB in 1,024 chunks of .distcp, in one file and in a file each, and in one chunk."""
    count = states.scaled(CHUNKS, context.scale)
    state = states.random_state({NAME: (count, COLUMNS)}, torch.float32)
    sample = states.sample(state)
    size = count * COLUMNS * 4
    target = context.directory / "target"

    def saved(name: str, planner: DefaultSavePlanner, **options: Any) -> Path:
        path = context.directory / name
        writer = FileSystemWriter(path, thread_count=1, **options)
        save(state, storage_writer=writer, planner=planner, no_dist=True)
        files.make_durable(path)
        return path

    one = saved("one", DefaultSavePlanner())

    def add(name: str, source: Path) -> Contender:
        of_one: list[float] = []

        def before() -> None:
            """Right before each: what it is compared with."""
            files.bring_into_memory([*files.files_in(one), *files.files_in(source)])
            of_one.append(convert_timed(one, target, size).cpu_seconds)
            files.remove(target)

        def run() -> Timing:
            timing = convert_timed(source, target, size)
            timing.figures["times"] = timing.cpu_seconds / of_one[-1]
            return timing

        return Contender(
            name=name,
            role="ours",
            before=before,
            run=run,
            check=lambda: states.check_equal(sample, rivals.read_safetensors(target, sample)),
            after=lambda: files.remove(target),
            skip=rivals.why_not_ours("convert"),
        )

    return Row(
        title="Convert one tensor of .distcp to a Hugging Face directory, warm",
        bytes=size,
        tensors=1,
        contenders=[
            add("ours, one chunk", one),
            add(f"ours, {count:,} chunks", saved("many", _Chunks())),
            add(
                f"ours, {count:,} chunks in files of their own",
                saved("apart", _Chunks(), single_file_per_rank=False),
            ),
        ],
        limit="",
        figures=FIGURES,
        close=lambda: files.empty(context.directory),
    )
