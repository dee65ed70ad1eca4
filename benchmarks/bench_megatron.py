"""Rows: saves and loads by the calls of Megatron Core's dist_checkpointing, on two ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks import files, ranks, rivals
from benchmarks.bench_megatron_plan import why_not
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing

WORLD = 2
GPT_BYTES = 2 * (7 * (4 * 2048 * 2048 + 3 * 5632 * 2048 + 2048) + 2 * 25600 * 2048)
UPSTREAM, OURS = "Megatron Core", "ours, dist_checkpointing"
COSTS = (Figure("cpu", "CPU s"), Figure("memory", "extra MB"))
SAVE = (
    Figure("seconds", "s", worst=True, compared=True),
    Figure("first_seconds", "first save of a process, s", worst=True),
    *COSTS,
    Figure("files", "data files a rank"),
    Figure("disk", "MB on the disk"),
)
BESIDE = (
    Figure("blocked", "blocked ms", worst=True, compared=True),
    Figure("seconds", "durable s", worst=True, compared=True),
    Figure("first_blocked", "first save of a process: blocked ms", worst=True),
    Figure("first_seconds", "durable s", worst=True),
    *COSTS,
)
LOAD = (Figure("seconds", "s", worst=True, compared=True), *COSTS)
READ = (
    *LOAD,
    Figure("asked", "bytes asked for of those needed"),
    Figure("from_disk", "read from the disk of those needed"),
    Figure("merging", "merges, ms"),
    Figure("cached", "MB that the page cache then has"),
)
DATA = (".distcp", ".safetensors")
PACKAGES = {UPSTREAM: "megatron", OURS: "ours"}


def _run(
    context: Context,
    package: str,
    job: str,
    state: str,
    path: Path,
    bytes_: int,
    world: int = WORLD,
) -> Timing:
    words = [package, job, "--state", state, "--scale", str(context.scale)]
    words += ["--path", str(path), "--program", str(context.program.path)]
    answer = ranks.run_ranks("benchmarks.megatron_rank", [words] * world)[0]
    assert answer is not None  # rank 0 speaks for all
    needed = max(1.0, answer["needed"])
    figures = {
        "seconds": answer["seconds"],
        "first_seconds": answer["first_seconds"],
        "cpu": answer["cpu"],
        "memory": answer["extra_memory"] / 1e6,
        "blocked": 1e3 * answer.get("blocked", 0.0),
        "first_blocked": 1e3 * answer.get("first_blocked", 0.0),
        "asked": answer["read"] / needed,
        "from_disk": answer["from_disk"] / needed,
        "files": sum(1 for each in path.iterdir() if each.suffix in DATA) / world,
        "merging": 1e3 * answer.get("merging", 0.0),
        "cached": files.bytes_in_memory(files.files_in(path)) / 1e6,
        "disk": sum(each.stat().st_blocks for each in path.iterdir()) * 512 / 1e6,
    }
    return Timing(
        answer["seconds"], answer["cpu"], bytes_, int(answer["extra_memory"]), figures=figures
    )


def _save_row(context: Context, state: str, title: str, bytes_: int, count: int) -> Row:
    folder = context.directory / "megatron"
    path = folder / "saved"

    def add(name: str, package: str) -> Contender:
        def check() -> None:
            _run(context, package, "load", state, path, bytes_)

        return Contender(
            name=name,
            role="ours" if package == "ours" else "rival",
            before=folder.mkdir,
            run=lambda: _run(context, package, "save", state, path, bytes_),
            check=check,
            after=lambda: files.remove(folder),
            skip=why_not(),
        )

    # What is written by Megatron is durable by one sync of it afterwards.
    contenders = [add(name, package) for name, package in PACKAGES.items()]
    limit = ""
    if state == "gpt":
        limit = rivals.FRESH
        disk = rivals.write_limit(context, limit, "direct", bytes_)
        contenders.append(dataclasses.replace(disk, run=lambda: _with_seconds(disk.run())))
    return Row(title, bytes_, count, contenders, limit, figures=SAVE)


def _with_seconds(timing: Timing | None) -> Timing:
    assert timing is not None
    return dataclasses.replace(timing, figures={"seconds": timing.seconds})


def _load_row(
    context: Context,
    state: str,
    title: str,
    bytes_: int,
    count: int,
    *,
    cold: bool,
    world: int = WORLD,
) -> Row:
    folder = context.directory / "megatron"
    paths = {package: folder / package for package in PACKAGES.values()}

    def make(package: str) -> None:
        folder.mkdir(exist_ok=True)
        if not paths[package].exists():
            _run(context, package, "save", state, paths[package], bytes_)
        found = files.files_in(paths[package])
        if cold:
            files.drop_from_memory(found)
        else:
            files.bring_into_memory(found)

    def add(name: str, package: str, source: str) -> Contender:
        return Contender(
            name=name,
            role="ours" if package == "ours" else "rival",
            before=lambda: make(source),
            run=lambda: _run(context, package, "load", state, paths[source], bytes_, world),
            skip=why_not(),
        )

    contenders = [add(name, package, package) for name, package in PACKAGES.items()]
    contenders.append(add("ours, Megatron's directory", "ours", "megatron"))
    limit = ""
    if state == "gpt":
        limit = rivals.COLD_READ if cold else rivals.WARM_READ

        def read() -> Timing:
            words = ["read_cold"] if cold else ["read_warm", 2]
            shards = sorted(paths["ours"].glob("*.safetensors"))
            return _with_seconds(context.program.time(*words, *shards))

        contenders.append(Contender(limit, "limit", read, before=lambda: make("ours")))
    return Row(
        title,
        bytes_,
        count,
        contenders,
        limit,
        bound=rivals.READ_BOUND,
        figures=LOAD if state.endswith("objects") else READ,
        close=lambda: files.empty(context.directory),
    )


def _gpt_bytes(context: Context) -> int:
    return int(GPT_BYTES * context.scale)


@row("megatron_save_gpt", memory=("as-is",))
def megatron_save_gpt(context: Context) -> Row:
    """A GPT of 0.93 GB, TP 2."""
    return _save_row(context, "gpt", "Save a GPT, TP 2, durable", _gpt_bytes(context), 37)


@row("megatron_load_gpt_cold", memory=("as-is",))
def megatron_load_gpt_cold(context: Context) -> Row:
    """The same, from the disk."""
    title = "Load a GPT, TP 2, cold"
    return _load_row(context, "gpt", title, _gpt_bytes(context), 37, cold=True)


@row("megatron_load_gpt_warm", memory=("as-is",))
def megatron_load_gpt_warm(context: Context) -> Row:
    """The same, from the page cache."""
    title = "Load a GPT, TP 2, warm"
    return _load_row(context, "gpt", title, _gpt_bytes(context), 37, cold=False)


@row("megatron_reshard_gpt", memory=("as-is",))
def megatron_reshard_gpt(context: Context) -> Row:
    """Saved by TP 2, loaded by TP 4, from the disk."""
    title = "Load a GPT of TP 2 into TP 4, cold"
    return _load_row(context, "gpt", title, _gpt_bytes(context), 37, cold=True, world=4)


@row("megatron_async_gpt", memory=("as-is",))
def megatron_async_gpt(context: Context) -> Row:
    """Saves in the background, of the same."""
    folder, bytes_ = context.directory / "megatron", _gpt_bytes(context)
    path = folder / "saved"

    def add(name: str, package: str) -> Contender:
        def run() -> Timing:
            return _run(context, package, "save_beside", "gpt", path, bytes_)

        def check() -> None:
            _run(context, package, "load", "gpt", path, bytes_)

        return Contender(
            name=name,
            role="ours" if package == "ours" else "rival",
            before=folder.mkdir,
            run=run,
            check=check,
            after=lambda: files.remove(folder),
            skip=why_not(),
        )

    def copy() -> Timing:
        timing = context.program.time("memcpy", bytes_, 2)
        return dataclasses.replace(timing, figures={"blocked": 1e3 * timing.seconds})

    title = "Save a GPT, TP 2, in the background, durable"
    limit = "memcpy, 2 threads"
    contenders = [add(name, package) for name, package in PACKAGES.items()]
    contenders.append(Contender(limit, "limit", copy))
    return Row(title, bytes_, 37, contenders, limit, bound=rivals.READ_BOUND, figures=BESIDE)


@row("megatron_save_layers", memory=("as-is",))
def megatron_save_layers(context: Context) -> Row:
    """Many boxes that lie in a row, and become one."""
    count = max(1, round(96 * context.scale))
    return _save_row(context, "layers", "Save 96 layers of 1 MiB, TP 2, durable", count << 20, 1)


@row("megatron_save_apart", memory=("as-is",))
def megatron_save_apart(context: Context) -> Row:
    """Boxes that do not make one."""
    bytes_ = 40 * max(1, round(256 * context.scale)) * 2048 * 2
    title = "Save a matrix of 20 boxes apart on each of 2 ranks, durable"
    return _save_row(context, "apart", title, bytes_, 1)


@row("megatron_save_many", memory=("as-is",))
def megatron_save_many(context: Context) -> Row:
    """5,000 small tensors that both ranks have."""
    count = max(1, round(5000 * context.scale))
    title = "Save 5,000 tensors of 512 B, on both of 2 ranks, durable"
    return _save_row(context, "many", title, 512 * count, count)


@row("megatron_load_many", memory=("as-is",))
def megatron_load_many(context: Context) -> Row:
    """The same."""
    count = max(1, round(5000 * context.scale))
    title = "Load 5,000 tensors of 512 B, on both of 2 ranks, warm"
    return _load_row(context, "many", title, 512 * count, count, cold=False)


OBJECTS = {"objects": 10_000, "more_objects": 50_000}


def _objects(context: Context, state: str, *, saves: bool) -> Row:
    """Objects that both ranks have."""
    count = max(1, round(OBJECTS[state] * context.scale))
    what = f"{OBJECTS[state]:,} objects, on both of 2 ranks"
    if saves:
        return _save_row(context, state, f"Save {what}, durable", count, count)
    return _load_row(context, state, f"Load {what}, warm", count, count, cold=False)


@row("megatron_save_objects", memory=("as-is",))
def megatron_save_objects(context: Context) -> Row:
    return _objects(context, "objects", saves=True)


@row("megatron_load_objects", memory=("as-is",))
def megatron_load_objects(context: Context) -> Row:
    return _objects(context, "objects", saves=False)


@row("megatron_save_more_objects", memory=("as-is",))
def megatron_save_more_objects(context: Context) -> Row:
    return _objects(context, "more_objects", saves=True)


@row("megatron_load_more_objects", memory=("as-is",))
def megatron_load_more_objects(context: Context) -> Row:
    return _objects(context, "more_objects", saves=False)
