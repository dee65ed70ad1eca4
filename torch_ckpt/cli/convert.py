"""torch-ckpt convert: a checkpoint of one format as one of another."""

from __future__ import annotations

import click

from torch_ckpt.cli.merge_options import with_merge_options
from torch_ckpt.cli.output import Output, count, format_bytes, with_output
from torch_ckpt.conversion.convert import TARGETS, Target
from torch_ckpt.conversion.convert import convert as converted
from torch_ckpt.export.files import NAMINGS
from torch_ckpt.export.merge import FileNames
from torch_ckpt.options import local_path


@click.command()
@click.argument("source", metavar="IN", type=click.Path())
@click.argument("target", metavar="OUT", type=click.Path())
@click.option("--to", type=click.Choice(list(TARGETS)), help="What OUT is to be. Default: as IN.")
@click.option("--format", help="What IN is read as: torch_ckpt, hf, dcp, megatron or torch.")
@click.option("--no-objects", is_flag=True, help="Leave out the leaves that are no tensors.")
@click.option(
    "--naming",
    type=click.Choice(list(NAMINGS)),
    help="With --to hf: what the files are called. Default: as those of IN.",
)
@click.option(
    "--extra",
    "extras",
    multiple=True,
    type=click.Path(exists=True),
    help="With --to hf: a file to put beside the tensors, or a directory: all of it but weights. "
    "Default: configuration, tokenizer and code beside those of IN.",
)
@click.option(
    "--tensor-mapping",
    metavar="TABLE|FILE",
    help="Put tensors together of others, or take them apart: a table of torch_ckpt, as "
    "qwen3_moe, or a JSON file with pairs of views.",
)
@with_merge_options
@with_output
def convert(
    source: str,
    target: str,
    to: Target | None,
    format: str | None,
    dtype: str | None,
    keep_fp32: tuple[str, ...],
    key_mapping: tuple[tuple[str, str], ...],
    tensor_mapping: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overwrite: bool,
    no_objects: bool,
    naming: FileNames | None,
    extras: tuple[str, ...],
    max_shard_size: str | None,
    memory_budget: str,
    threads: int,
    no_verify: bool,
    no_direct_io: bool,
    output: Output,
) -> None:
    """Write the checkpoint IN, of any format that is read, to OUT.

    IN is a directory of torch_ckpt, of stock DCP, of the Hub or of plain safetensors files, or a
    file of safetensors or torch.save. No pickle is run. All or nothing. With --to dcp
    and --to torch, a file, torch is imported.

    \b
    torch-ckpt convert run.pt weights --to hf --dtype bf16 --exclude 'optim*'
    torch-ckpt convert dcp_checkpoint resharded --to torch_ckpt
    torch-ckpt convert trained hub --to hf --tensor-mapping qwen3_moe
    """
    with output.progress("converting") as progress:
        answer = converted(
            source,
            target,
            to,
            format=format,
            dtype=dtype,
            keep_fp32=keep_fp32,
            key_mapping=key_mapping or None,
            tensor_mapping=tensor_mapping,
            objects=not no_objects,
            include=include,
            exclude=exclude,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            naming=naming,
            extras=list(extras) or None,
            verify=not no_verify,
            memory_budget=memory_budget,
            num_threads=threads,
            direct_io=not no_direct_io,
            progress=progress,
        )
    place = local_path(target)
    output.report(
        {"input": local_path(source), "output": place, **answer},
        lambda: f"{place}: {count(answer['files'], 'file')}, {format_bytes(answer['bytes'])}",
    )
