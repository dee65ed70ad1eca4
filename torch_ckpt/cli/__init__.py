"""The torch-ckpt command. Torch is imported by the few commands that need it, when they do."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import click

import torch_ckpt

# The module here that each command is in. It is imported when it is asked for: all of them take
# longer than most commands do.
_MODULES = {
    "clean": "clean",
    "consolidate": "consolidate",
    "convert": "convert",
    "diff": "diff",
    "doctor": "doctor",
    "inspect": "inspect",
    "layout": "layout",
    "ls": "ls",
    "recover": "verify",
    "run": "run",
    "show": "show",
    "timeline": "timeline",
    "verify": "verify",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"torch_ckpt.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


def _say_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"torch-ckpt, version {torch_ckpt.__version__}")
        context.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_say_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Checkpoints of torch.distributed.checkpoint, safetensors and torch.save: look, check,
    compare, repair, merge, convert.

    Exit status: 0 done, 1 corrupt or failed, 2 wrong usage, 3 incomplete, 4
    different (diff), 130 interrupted.
    """


def main() -> None:
    """Entry point; leaves by SystemExit, but for `run`, which leaves as its program does."""
    programs: list[Callable[[], None]] = []
    try:
        cli(prog_name="torch-ckpt", obj=programs)
    except SystemExit as end:
        if end.code or not programs:
            raise
    programs[0]()  # not within click, which takes some errors for its own
