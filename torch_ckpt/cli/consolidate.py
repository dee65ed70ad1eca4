"""torch-ckpt consolidate: a sharded checkpoint to final Hugging Face files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from torch_ckpt.checkpoint.names import INDEX
from torch_ckpt.cli.merge_options import with_merge_options
from torch_ckpt.cli.output import Output, count, format_bytes, with_output, world_size
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.extras import ExtraFiles
from torch_ckpt.export.files import NAMINGS, load_json
from torch_ckpt.export.merge import FileNames, MergeRequest, make_merge, merge
from torch_ckpt.native.progress import Progress
from torch_ckpt.options import local_path

_TIMEOUT_S = 600.0  # until a rank that does not answer is taken for dead


@click.command()
@click.argument("input_dir", metavar="IN", type=click.Path())
@click.argument("output_dir", metavar="OUT", type=click.Path())
@click.option(
    "--mapping",
    type=click.Path(exists=True, dir_okay=False),
    help='JSON object {"tensor name": file number from 1}.',
)
@click.option(
    "--index",
    type=click.Path(exists=True),
    help=f"Divide the tensors as this {INDEX} (or the one in this directory) does.",
)
@click.option(
    "--naming",
    type=click.Choice(list(NAMINGS)),
    default="dcp",
    show_default=True,
    help="hf: one file is model.safetensors; diffusers, peft: their names.",
)
@click.option(
    "--extra",
    "extras",
    multiple=True,
    type=click.Path(exists=True),
    help="A file to put beside the tensors, or a directory: all of it but weights.",
)
@click.option("--no-strict", is_flag=True, help="Leave out tensors that the mapping lacks.")
@with_merge_options
@with_output
def consolidate(
    input_dir: str,
    output_dir: str,
    mapping: str | None,
    index: str | None,
    threads: int,
    max_shard_size: str | None,
    naming: FileNames,
    dtype: str | None,
    keep_fp32: tuple[str, ...],
    memory_budget: str,
    extras: tuple[str, ...],
    key_mapping: tuple[tuple[str, str], ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overwrite: bool,
    no_strict: bool,
    no_verify: bool,
    no_direct_io: bool,
    output: Output,
) -> None:
    """Merge the shards in IN into whole tensors in OUT.

    Both are directories. OUT gets model-XXXXX-of-XXXXX.safetensors and their index; it may be IN.
    All or nothing. Under torchrun all processes share the work.

    \b
    torch-ckpt consolidate run/step-1000 model --naming hf --dtype bf16
    torchrun --nproc-per-node 8 -m torch_ckpt consolidate run/step-1000 model
    """
    if mapping and index:
        raise click.UsageError("--mapping and --index exclude each other.")
    paths = {"input": local_path(input_dir), "output": local_path(output_dir)}

    def make() -> tuple[MergeRequest, ExtraFiles]:
        return make_merge(
            input_dir,
            output_dir,
            _read_mapping(mapping) if mapping else index,
            threads,
            strict=not no_strict,
            verify=not no_verify,
            max_shard_size=max_shard_size,
            naming=naming,
            dtype=dtype,
            keep_fp32=keep_fp32,
            extras=extras,
            memory_budget=memory_budget,
            key_mapping=key_mapping,
            include=include,
            exclude=exclude,
            overwrite=overwrite,
            direct_io=not no_direct_io,
        )

    with output.progress("consolidating") as progress:
        answer = _merge(make, progress)
    output.report(
        {**paths, **answer},
        lambda: (
            f"{paths['output']}: {count(answer['files'], 'file')}, {format_bytes(answer['bytes'])}"
        ),
    )


def _merge(
    make: Callable[[], tuple[MergeRequest, ExtraFiles]], progress: Progress | None
) -> dict[str, Any]:
    if world_size() == 1:
        return merge(*make(), progress)
    import torch.distributed as dist  # only here: it takes seconds

    from torch_ckpt.export.consolidate import merge_on_every_rank
    from torch_ckpt.ranks import Ranks

    with _stdout_to_stderr():
        try:
            dist.init_process_group("gloo")
        except (ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"WORLD_SIZE says {world_size()} processes, and they could not meet; start them "
                f"with torchrun, or unset it: {error}"
            ) from error
        try:
            return merge_on_every_rank(make, Ranks.of(None, timeout=_TIMEOUT_S), progress)
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps stdout for the report: the Gloo of torch 2.10 prints there when ranks meet."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _read_mapping(path: str) -> dict[str, int]:
    mapping = load_json(path)
    if not isinstance(mapping, dict) or not all(type(value) is int for value in mapping.values()):
        raise click.UsageError(f'{path} is not a JSON object {{"tensor name": file number}}')
    return mapping
