"""Rows: commands on checkpoints of other formats, from start to end, beside what stock offers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import files, rivals, row_save, states
from benchmarks.commands import OURS, run_command, script
from benchmarks.contender import Contender, Context, Figure, Role, Row, row

SECONDS = Figure("seconds", "s", worst=True, compared=True)
PEAK = Figure("peak_mb", "peak MB")
SCRIPTS = "benchmarks.whole_in_memory"


def convert_row(context: Context, shapes: states.Shapes, dtype: torch.dtype, what: str) -> Row:
    """A directory of .distcp files to one of bfloat16 for `from_pretrained`, durable. Imports are
    in the time of each."""
    source, target = context.directory / "distcp", context.directory / "target"
    state = states.random_state(shapes, dtype)
    for tensor in state.values():
        tensor.nan_to_num_().clamp_(-3e38, 3e38)  # or torch and ours differ in what NaNs become
    row_save.save_with_file_system(state, source, 1)
    sample = {name: tensor.bfloat16() for name, tensor in states.sample(state).items()}
    del state
    size = states.total_bytes(shapes, torch.bfloat16)

    def add(
        name: str, role: Role, words: list[str], read: Callable[[], states.State] | None = None
    ) -> Contender:
        find = read or (lambda: rivals.read_safetensors(target, sample))
        return Contender(
            name=name,
            role=role,
            before=lambda: files.bring_into_memory(files.files_in(source)),
            run=lambda: run_command(words, size),
            check=lambda: states.check_equal(sample, find()),
            after=lambda: files.remove(target),
            skip=rivals.why_not_ours("convert") if role == "ours" else "",
        )

    load = f"{SCRIPTS}:load_cast_and_save"
    contenders = [
        add("DCP load, save_file and fsync", "rival", script(load, source, target, "bfloat16"))
    ]
    if dtype == torch.bfloat16:
        merge, to_torch = f"{SCRIPTS}:merge_weights", f"{SCRIPTS}:dcp_to_torch"
        contenders += [
            add("accelerate merge-weights", "rival", script(merge, source, target)),
            add(
                "dcp_to_torch_save",
                "rival",
                script(to_torch, source, target),
                lambda: torch.load(target / "model.pt", mmap=True),
            ),
        ]
    convert = [*OURS, "convert", str(source), str(target), "--to", "hf", "--dtype", "bf16", "-q"]
    return Row(
        title=f"{what} of .distcp files to a Hugging Face directory, durable, the whole command",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *contenders,
            add("ours, torch-ckpt convert", "ours", convert),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
        close=lambda: files.empty(context.directory),
    )


@row("convert_distcp")
def convert_distcp(context: Context) -> Row:
    """Llama 1B."""
    return convert_row(context, states.llama_1b(context.scale), torch.bfloat16, "Llama 1B bfloat16")


@row("convert_cast")
def convert_cast(context: Context) -> Row:
    """1.07 GB of float32, to bfloat16."""
    height = states.scaled(4096, context.scale)
    shapes: states.Shapes = {f"model.layers.{i}.weight": (height, 4096) for i in range(16)}
    return convert_row(context, shapes, torch.float32, "1.07 GB of float32")


def diff_row(context: Context, title: str, rival: str, *, equal: bool) -> Row:
    """The Llama weights as .distcp files and as one safetensors file."""
    shapes = states.llama_1b(context.scale)
    left, right = context.directory / "distcp", context.directory / "whole"
    state = states.random_state(shapes, torch.bfloat16)
    for tensor in state.values():
        tensor.nan_to_num_()  # which are not equal to themselves
    row_save.save_with_file_system(state, left, 1)
    if not equal:
        for tensor in state.values():
            tensor.clamp_(-100, 100)
            tensor.view(torch.int16).bitwise_xor_(1)
    right.mkdir()
    save_file(state, right / "model.safetensors", metadata={"format": "pt"})
    del state
    size = states.total_bytes(shapes, torch.bfloat16)

    def add(name: str, role: Role, words: list[str], status: int = 0) -> Contender:
        return Contender(
            name=name,
            role=role,
            before=lambda: files.bring_into_memory(files.files_in(context.directory)),
            run=lambda: run_command(words, size, status=status),
            skip=rivals.why_not_ours("convert") if role == "ours" else "",
        )

    ours = [*OURS, "diff", str(left), str(right), "-q"]
    return Row(
        title=title,
        bytes=size,
        tensors=len(shapes),
        contenders=[
            add("load both and compare", "rival", script(f"{SCRIPTS}:{rival}", left, right)),
            add("ours, torch-ckpt diff", "ours", ours, 0 if equal else 4),
        ],
        limit="",
        figures=(SECONDS, PEAK),
        close=lambda: files.empty(context.directory),
    )


@row("diff_formats", memory=("as-is",))
def diff_formats(context: Context) -> Row:
    """They are equal."""
    title = "Compare .distcp files with a safetensors file, the whole command, warm"
    return diff_row(context, title, "compare", equal=True)


@row("diff_values", memory=("as-is",))
def diff_values(context: Context) -> Row:
    """All values differ."""
    title = "The same where all values differ, how many and by how much"
    return diff_row(context, title, "compare_values", equal=False)


def write_headers(directory: Path, names: list[str], in_a_file: int) -> None:
    """Tensors of 16 bytes as plain safetensors files, some in each, with an index."""
    directory.mkdir()
    count = -(-len(names) // in_a_file)
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        held = names[number * in_a_file : (number + 1) * in_a_file]
        save_file({each: torch.ones(4) for each in held}, directory / name)
        weight_map |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": 16 * len(names)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def inspect_row(context: Context, what: str, write: Callable[[Path, list[str]], None]) -> Row:
    """`torch-ckpt inspect`, from start to end. Files are in the page cache."""
    count = max(10, int(100_000 * context.scale))
    names = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.weight" for i in range(count)]
    path = context.directory / "source"
    write(path, names)
    inputs = files.files_in(path)

    def add(name: str, role: Role, words: list[str]) -> Contender:
        return Contender(
            name=name,
            role=role,
            before=lambda: files.bring_into_memory(inputs),
            run=lambda: run_command(words, count),
            skip=rivals.why_not_ours("convert") if role == "ours" else "",
        )

    return Row(
        title=f"inspect of {count:,} tensors, {what}, the whole command",
        bytes=0,
        tensors=count,
        contenders=[
            add("safe_open, keys and shapes", "rival", script(f"{SCRIPTS}:list_keys", path)),
            add("ours, torch-ckpt inspect", "ours", [*OURS, "inspect", str(path), "-q"]),
            Contender(
                name="python -c pass",
                role="limit",
                run=lambda: run_command(["-c", "pass"], count),
            ),
        ],
        limit="python -c pass",
        bound="reference",
        figures=(SECONDS, PEAK),
        close=lambda: files.empty(context.directory),
    )


@row("inspect_ours", memory=("as-is",))
def inspect_ours(context: Context) -> Row:
    """A checkpoint of ours, by its catalog."""

    def write(path: Path, names: list[str]) -> None:
        rivals.ours("save")({name: torch.ones(4) for name in names}, path)

    return inspect_row(context, "our catalog", write)


@row("inspect_headers", memory=("as-is",))
def inspect_headers(context: Context) -> Row:
    """Plain safetensors files, a thousand tensors in each."""
    return inspect_row(
        context, "plain headers of 1,000", lambda path, names: write_headers(path, names, 1000)
    )


@row("inspect_files", memory=("as-is",))
def inspect_files(context: Context) -> Row:
    """A file for each tensor."""
    return inspect_row(context, "a file each", lambda path, names: write_headers(path, names, 1))
