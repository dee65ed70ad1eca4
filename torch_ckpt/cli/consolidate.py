"""torch-ckpt consolidate: a sharded checkpoint to final Hugging Face files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from torch_ckpt.cli.output import Output, count, format_bytes, with_output, world_size
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.merge import merge, merge_request
from torch_ckpt.progress import Progress

_INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"-(\d{5})-of-\d{5}\.safetensors$")


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
    help=f"Divide the tensors as this {_INDEX} (or the one in this directory) does.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="At least four run.",
)
@click.option("--no-strict", is_flag=True, help="Leave out tensors that the mapping lacks.")
@click.option("--no-verify", is_flag=True, help="Do not compare what is read with its digests.")
@with_output
def consolidate(
    input_dir: str,
    output_dir: str,
    mapping: str | None,
    index: str | None,
    threads: int,
    no_strict: bool,
    no_verify: bool,
    output: Output,
) -> None:
    """Merge the checkpoint in directory IN into whole tensors in directory OUT.

    OUT gets model-XXXXX-of-XXXXX.safetensors and their index; it may be IN. All or nothing. Under
    torchrun all processes share the work.
    """
    if mapping and index:
        raise click.UsageError("--mapping and --index exclude each other.")
    files = _read_mapping(mapping) if mapping else _read_index(index) if index else None
    request = merge_request(
        input_dir, output_dir, files, threads, strict=not no_strict, verify=not no_verify
    )
    with output.progress("consolidating") as progress:
        answer = _merge(request, progress)
    output.report(
        {"input": request["input"], "output": request["output"], **answer},
        lambda: (
            f"{request['output']}: {count(answer['files'], 'file')}, "
            f"{format_bytes(answer['bytes'])}"
        ),
    )


def _merge(request: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    if world_size() == 1:
        return merge(request, progress)
    import torch.distributed as dist  # only here: it takes seconds

    from torch_ckpt.consolidate import merge_on_every_rank

    with _stdout_to_stderr():
        try:
            dist.init_process_group("gloo")
        except (ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"WORLD_SIZE says {world_size()} processes, and they could not meet; start them "
                f"with torchrun, or unset it: {error}"
            ) from error
        try:
            return merge_on_every_rank(lambda: request, None, progress)
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


def _load_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes(), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} is not JSON: {error}") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands in it twice")
    return names


def _read_mapping(path: str) -> dict[str, int]:
    mapping = _load_json(path)
    if not isinstance(mapping, dict) or not all(type(value) is int for value in mapping.values()):
        raise click.UsageError(f'{path} is not a JSON object {{"tensor name": file number}}')
    return mapping


def _read_index(path: str) -> dict[str, int]:
    """The mapping that an index file implies: the numbers in its file names, or their order."""
    if Path(path).is_dir():
        path = str(Path(path) / _INDEX)
        if not Path(path).is_file():
            raise click.UsageError(f"there is no {path}")
    index = _load_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        raise click.UsageError(f"{path} has no weight_map of tensor names and file names")
    names = sorted(set(weights.values()))
    numbers = {name: number for number, name in enumerate(names, start=1)}
    matches = {name: _NUMBERED.search(name) for name in names}
    if all(matches.values()):
        numbers = {name: int(match[1]) for name, match in matches.items() if match}
    if len(set(numbers.values())) != len(names):
        raise click.UsageError(f"{path} names two files of one number")
    return {tensor: numbers[name] for tensor, name in weights.items()}
