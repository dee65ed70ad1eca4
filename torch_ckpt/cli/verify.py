"""torch-ckpt verify and recover."""

from __future__ import annotations

import dataclasses

import click

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.cli.output import Output, count, format_bytes, with_output


@click.command()
@click.argument("path", type=click.Path())
@click.option(
    "--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Reading threads."
)
@click.option("--no-direct-io", is_flag=True, help="Read through the page cache.")
@click.option("--format", help="What PATH is read as: torch_ckpt, hf, dcp, megatron or torch.")
@with_output
def verify(path: str, threads: int, no_direct_io: bool, format: str | None, output: Output) -> None:
    """Compare every byte of the checkpoint PATH with its digest.

    What torch_ckpt wrote has digests; of files of stock DCP and torch.save the CRC-32 of every
    entry is compared. Other files have neither.

    \b
    torch-ckpt verify run/step-1000 && echo whole
    """
    checkpoint = Checkpoint(path, format=format)
    with output.progress("verifying") as progress:
        report = checkpoint.verify(workers=threads, progress=progress, direct_io=not no_direct_io)
    output.report(
        {"path": checkpoint.path, **dataclasses.asdict(report)},
        lambda: (
            f"{checkpoint.path}: {count(report.files, 'file')}, {format_bytes(report.bytes)}: "
            "all digests match"
        ),
    )


@click.command()
@click.argument("path", type=click.Path())
@with_output
def recover(path: str, output: Output) -> None:
    """Finish an interrupted save, or remove what it left.

    Every save does this first; this command is for directories that no save will come to. 'clean'
    says what there is before it does the same, for all checkpoints of a directory.

    \b
    torch-ckpt recover run/step-1000
    """
    checkpoint = Checkpoint(path)
    acted = checkpoint.recover()
    output.report(
        {"path": checkpoint.path, "recovered": acted},
        lambda: (
            f"{checkpoint.path}: "
            + ("recovered" if acted else "nothing to do, no save was interrupted")
        ),
    )
