"""The options of the commands that merge: what is written, and with how much of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from torch_ckpt.export.merge import MEMORY_BUDGET

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--dtype", help="Store floats as bf16, fp16, fp32, ..., or as this directory does."
    ),
    click.option(
        "--keep-fp32",
        multiple=True,
        metavar="REGEX",
        help="Store floats of these names in fp32; may be given several times.",
    ),
    click.option(
        "--rename",
        "key_mapping",
        multiple=True,
        type=(str, str),
        metavar="REGEX REPLACEMENT",
        help="Store tensors under other names; of several, the first found in a name counts.",
    ),
    click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Take leaves of these names only, as 'model.*'; * stands for dots too.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out leaves of these names, as 'optim*'.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace what a save or a merge wrote there."),
    click.option(
        "--max-shard-size", help='Bytes of tensors in a file at most, as "5GB" or "5GiB".'
    ),
    click.option(
        "--memory-budget",
        default=MEMORY_BUDGET,
        show_default=True,
        help="Bytes that the buffers of each process take at most.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 256),
        default=4,
        show_default=True,
        help="Fewer than 4 mean 4.",
    ),
    click.option("--no-verify", is_flag=True, help="Do not compare what is read with its digests."),
    click.option("--no-direct-io", is_flag=True, help="Read and write through the page cache."),
)


def with_merge_options(command: _Command) -> _Command:
    """Adds dtype, keep_fp32, key_mapping, include, exclude, overwrite, max_shard_size,
    memory_budget, threads, no_verify and no_direct_io."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
