"""The torch-ckpt command. Works without torch, except under torchrun."""

from __future__ import annotations

import click

import torch_ckpt
from torch_ckpt.cli.clean import clean
from torch_ckpt.cli.consolidate import consolidate
from torch_ckpt.cli.convert import convert
from torch_ckpt.cli.diff import diff
from torch_ckpt.cli.doctor import doctor
from torch_ckpt.cli.inspect import inspect
from torch_ckpt.cli.layout import layout
from torch_ckpt.cli.ls import ls
from torch_ckpt.cli.show import show
from torch_ckpt.cli.timeline import timeline
from torch_ckpt.cli.verify import recover, verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(torch_ckpt.__version__, prog_name="torch-ckpt")
def cli() -> None:
    """Checkpoints of torch.distributed.checkpoint, safetensors and torch.save: look, check,
    compare, repair, merge, convert.

    Exit status: 0 done, 1 corrupt or failed, 2 wrong usage, 3 incomplete, 4
    different (diff), 130 interrupted.
    """


for _command in (clean, consolidate, convert, diff, inspect, ls, recover, show, verify):
    cli.add_command(_command)
for _command in (doctor, layout, timeline):
    cli.add_command(_command)


def main() -> None:
    """Entry point; leaves by SystemExit."""
    cli(prog_name="torch-ckpt")
