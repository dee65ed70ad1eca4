"""torch-ckpt run: a program as it is, with this engine in the place of stock DCP."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial

import click

# As `torchrun`, which takes what stands after the program for its arguments.
_AS_THEY_ARE = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_AS_THEY_ARE)
@click.option("-m", "as_module", is_flag=True, help="PROGRAM is a module, as for `python -m`.")
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, program: str, arguments: tuple[str, ...], as_module: bool) -> None:
    """Run the Python program PROGRAM, unedited, with torch_ckpt in the place of stock DCP.

    What the program calls is patched as by torch_ckpt.patch_torch(file_system=True,
    default_storage=True); so are the checkpoint managers of torchtitan and NeMo AutoModel, when the
    program imports them. Processes that the program starts are not patched: a launcher goes before
    this command. The exit status is the program's.

    \b
    torch-ckpt run train.py --lr 0.1
    torchrun --nproc-per-node 8 -m torch_ckpt run -m torchtitan.train --module llama3
    """
    if not as_module and not os.path.exists(program):
        raise click.UsageError(f"there is no file {program}; a module needs -m before its name")
    programs: list[Callable[[], None]] = context.ensure_object(list)
    programs.append(partial(_run, program, arguments, as_module))


def _run(program: str, arguments: tuple[str, ...], as_module: bool) -> None:
    _patch()
    # As the interpreter has them for `python PROGRAM` and `python -m PROGRAM`.
    sys.argv = [program, *arguments]
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(program))
    if as_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _patch() -> None:
    # Imported here: the help of this command is there without torch.
    from torch_ckpt.integrations.frameworks import install_when_imported
    from torch_ckpt.patching.patch import patch_torch

    patch_torch(file_system=True, default_storage=True)
    packages = install_when_imported()
    if os.environ.get("RANK", "0") == "0":
        also = f", and {' and '.join(packages)} when imported" if packages else ""
        click.echo(f"torch_ckpt: patched torch.distributed.checkpoint{also}", err=True)
