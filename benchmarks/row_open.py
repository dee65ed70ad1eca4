"""Rows: what opening costs. Opens, memory and bytes from the disk, of processes that begin anew."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, files, one_job, opens, ranks, rivals, row_save, states
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing
from benchmarks.simulated import Box, Part, save_as_ranks

SECONDS = Figure("milliseconds", "ms", worst=True, compared=True)
OPENS = Figure("opens", "opens")
MEMORY = Figure("memory", "extra MB")
DISK = Figure("disk", "MB from the disk")


class JobError(RuntimeError):
    """The process failed, or its tensors are not those that were saved."""


@dataclasses.dataclass(frozen=True)
class Jobs:
    """What a row's processes are started with.

    directory: of the row; all of this lies in it.
    kind: of one_job.JOBS.
    wanted: the tensors, of the dtypes that they are loaded into, zeroed or not.
    digests: of their bytes.
    world: how many processes load at once; with 1 they are no ranks.
    cold: from the disk.
    """

    context: Context
    kind: str
    wanted: Mapping[str, torch.Tensor]
    digests: Mapping[str, str]
    world: int = 1
    cold: bool = False

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.context.directory / "source"

    def write_inputs(self) -> None:
        """Beside the checkpoint: what to load, and a tiny checkpoint for the first use of code."""
        said = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in self.wanted.items()
        }
        (self.context.directory / "targets.json").write_text(json.dumps(said))
        save_as_ranks(self.context.directory / "warm", 1, lambda _: {"w": Box.whole(torch.ones(2))})

    def words(self, contender: str, rank: int) -> list[str]:
        """The arguments of one process."""
        here = self.context.directory
        return [
            *(self.kind, contender, "--source", str(self.source)),
            *("--targets", str(here / "targets.json"), "--warm", str(here / "warm")),
            *("--out", str(here / f"out-{rank}"), "--program", str(self.context.program.path)),
        ]

    def prepare(self) -> None:
        """Before each run: the files are in the page cache, or not."""
        prepare = files.drop_from_memory if self.cold else files.bring_into_memory
        prepare(files.files_in(self.source))

    def clean(self) -> None:
        """Behind each run."""
        for path in self.context.directory.glob("out-*"):
            files.remove(path)

    def run(self, contender: str) -> list[dict[str, Any]]:
        """Runs it once; what each process says."""
        if self.world > 1:
            words = [self.words(contender, rank) for rank in range(self.world)]
            answers = ranks.run_ranks("benchmarks.one_job", words)
        else:
            command = [sys.executable, "-m", "benchmarks.one_job", *self.words(contender, 0)]
            done = subprocess.run(
                command, cwd=environment.REPOSITORY, capture_output=True, text=True
            )
            if done.returncode != 0:
                last = done.stderr.strip().splitlines()[-1:]
                raise JobError(": ".join([f"it ended with status {done.returncode}", *last]))
            answers = [json.loads(done.stdout.splitlines()[-1])]
        said = [answer for answer in answers if answer is not None]
        if any(answer["digests"] != self.digests for answer in said):
            raise JobError("its tensors have other bytes than were saved")
        return said

    def count_opens(self, contender: str) -> int:
        """In a run of its own, since to count takes time."""
        words = [sys.executable, "-m", "benchmarks.one_job", *self.words(contender, 0)]
        env = {**os.environ, "PYTHONPATH": str(environment.REPOSITORY)}
        found = opens.count(words, self.source, env)
        self.clean()
        return found

    def contender(self, name: str) -> Contender:
        """One way to do it. Its opens are counted in the first round, they are always the same."""
        ours = name.startswith("ours")
        counted: list[int] = []

        def run() -> Timing:
            if self.world == 1 and not counted and not opens.why_not():
                counted.append(self.count_opens(name))
                self.prepare()
            said = self.run(name)
            slowest = max(answer["seconds"] for answer in said)
            figures = {
                "milliseconds": slowest * 1e3,
                "memory": sum(answer["memory"] for answer in said) / 1e6,
                "disk": sum(answer["disk"] for answer in said) / 1e6,
            }
            if counted:
                figures["opens"] = counted[0]
            memory = sum(answer["memory"] for answer in said)
            cpu = sum(answer["cpu"] for answer in said)
            size = sum(tensor.nbytes for tensor in self.wanted.values())
            return Timing(slowest, cpu, size * self.world, memory, figures)

        return Contender(
            name=name,
            role="ours" if ours else "rival",
            before=self.prepare,
            run=run,
            after=self.clean,
            skip=rivals.why_not_ours("load", "save") if ours else "",
        )


def job_row(
    jobs: Jobs, title: str, figures: list[Figure], *, tensors: int, without: tuple[str, ...] = ()
) -> Row:
    """All contenders of a kind of job, but those named."""
    jobs.write_inputs()
    missing = opens.why_not() if OPENS in figures else ""
    here = jobs.context.directory
    return Row(
        title=title + (f" (opens not counted: {missing})" if missing else ""),
        bytes=sum(tensor.nbytes for tensor in jobs.wanted.values()),
        tensors=tensors,
        contenders=[
            jobs.contender(name) for name in one_job.JOBS[jobs.kind] if name not in without
        ],
        limit="",
        figures=figures,
        close=lambda: files.empty(here),
    )


def saved_jobs(
    context: Context,
    kind: str,
    world: int,
    part: Callable[[int], Part],
    wanted: Mapping[str, torch.Tensor],
    **more: Any,
) -> Jobs:
    """A checkpoint of that many ranks, each with `part(rank)`; `wanted` are whole tensors of it."""
    jobs = Jobs(context, kind, wanted, one_job.digests(wanted), **more)
    save_as_ranks(jobs.source, world, part)
    return jobs


@row("open_files", memory=("as-is",))
def open_files(context: Context) -> Row:
    """One tensor of 16 bytes of a checkpoint of 8,192 files."""
    world = states.scaled(8192, context.scale)

    def part(rank: int) -> Part:
        return {f"t{rank}": Box.whole(torch.full((4,), float(rank)))}

    last = world - 1
    wanted = {f"t{last}": part(last)[f"t{last}"].tensor}
    jobs = saved_jobs(context, "load", world, part, wanted)
    title = f"Load one tensor of 16 bytes of a checkpoint of {world:,} files, warm"
    return job_row(jobs, title, [OPENS, SECONDS, MEMORY], tensors=world)


@row("open_ranks", memory=("as-is",))
def open_ranks(context: Context) -> Row:
    """One whole tensor beside 3,000 that 1,024 ranks share."""
    world, count = states.scaled(1024, context.scale), states.scaled(3000, context.scale)
    own = {"own": torch.arange(4.0)}

    def part(rank: int) -> Part:
        row_of = torch.full((1, 4), float(rank))
        boxes = {
            f"model.layers.{i}.weight": Box(row_of, (rank, 0), (world, 4)) for i in range(count)
        }
        return {**boxes, **({"own": Box.whole(own["own"])} if rank == 0 else {})}

    jobs = saved_jobs(context, "load", world, part, own)
    title = f"Load one tensor of 16 bytes beside {count:,} that {world:,} ranks have rows of, warm"
    # load_file reads all files; stock's reader makes objects of every box, which are gigabytes.
    without = ("safetensors load_file and copy_",)
    return job_row(jobs, title, [MEMORY, SECONDS, OPENS], tensors=count + 1, without=without)


@row("load_cast", memory=("as-is",))
def load_cast(context: Context) -> Row:
    """1 GiB of float32 in 128 files into bfloat16."""
    world = states.scaled(128, context.scale)
    elements = states.scaled(2 << 20, context.scale, 1024)

    def part(rank: int) -> Part:
        values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
        return {f"t{rank}": Box.whole(values)}

    wanted = {f"t{rank}": part(rank)[f"t{rank}"].tensor.bfloat16() for rank in range(world)}
    jobs = saved_jobs(context, "load", world, part, wanted)
    title = f"Load {world} files, {world * elements * 4 / 1e9:.3g} GB of float32, to bfloat16, warm"
    return job_row(jobs, title, [OPENS, SECONDS, MEMORY], tensors=world)


@row("merge_opens", memory=("as-is",))
def merge_opens(context: Context) -> Row:
    """600 row shards of 20 tensors into one file."""
    world = states.scaled(600, context.scale)

    def part(rank: int) -> Part:
        piece = torch.full((1, 1024), float(rank))
        return {f"t{i}": Box(piece, (rank, 0), (world, 1024)) for i in range(20)}

    whole = torch.arange(float(world)).unsqueeze(1).expand(world, 1024).contiguous()
    jobs = saved_jobs(context, "merge", world, part, {f"t{i}": whole for i in range(20)})
    title = f"Consolidate {world} shards x 20 tensors, warm"
    return job_row(jobs, title, [OPENS, SECONDS, MEMORY], tensors=20)


@row("load_node", memory=("as-is",))
def load_node(context: Context) -> Row:
    """600 MB, all of it by each of the 4 processes of a node, from the disk."""
    shapes = states.llama_1b(0.243 * context.scale)
    state = states.random_state(shapes, torch.bfloat16)
    jobs = Jobs(context, "load", state, one_job.digests(state), world=4, cold=True)
    row_save.save_with_our_save(state, jobs.source)
    title = "Load the same tensors by 4 processes of a node at once, cold"
    return job_row(jobs, title, [DISK, SECONDS, MEMORY], tensors=len(shapes))
