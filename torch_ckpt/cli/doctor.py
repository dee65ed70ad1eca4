"""torch-ckpt doctor: what a directory and this machine can do for saves."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from torch_ckpt.cli.checks import Check, checks_of
from torch_ckpt.cli.output import FAILED, Output, printable, with_output
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.progress import told
from torch_ckpt.options import local_path

_COLOURS = {"ok": "green", "slow": "yellow", "missing": "red"}


@click.command()
@click.argument("path", type=click.Path(), default=".")
@click.option(
    "--mib",
    type=click.IntRange(0, 1 << 20),
    default=256,
    show_default=True,
    help="MiB to write and to read for the speeds; 0: do not measure them.",
)
@with_output
def doctor(path: str, mib: int, output: Output) -> None:
    """Try what saves need of a directory.

    Looks at this machine too. Writes into a hidden directory in PATH, which is removed again; where
    there is no PATH yet, in the nearest directory above it. "slow" works, at the cost that is
    named. Exit status 1 where saves cannot work.

    \b
    torch-ckpt doctor /mnt/checkpoints
    torch-ckpt doctor /mnt/checkpoints --mib 4096
    """
    if output.silent:  # ranks that measured at the same time would each see a part of the speed
        return
    where = local_path(path)
    while not os.path.lexists(where):
        where = os.path.dirname(where)
    with output.progress("measuring") as progress, Job() as job:
        request = {"op": "probe", "path": where, "bytes": mib << 20, "job": job.id}
        with told(job, progress):
            facts = job.run(lambda: core.call(request))
    checks = checks_of(facts, measured=mib > 0)
    broken = [check for check in checks if check.needed and check.state == "missing"]
    fields = {
        "path": where,
        "works": not broken,
        "checks": [asdict(check) for check in checks],
        "facts": facts,
    }
    output.report(fields, lambda: _text(where, checks, broken))
    if broken:
        raise SystemExit(FAILED)


def _text(path: str, checks: list[Check], broken: list[Check]) -> str:
    names = max(len(check.name) for check in checks)
    found = max(len(printable(check.found)) for check in checks)
    lines: list[str] = []
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            title = f"{group} {printable(path)}" if group == "directory" else group
            lines += [*([""] if lines else []), click.style(title, bold=True)]
        state = click.style(check.state, fg=_COLOURS[check.state])
        line = f"  {check.name:{names}}  {printable(check.found):{found}}  {state}"
        if check.means:
            line += f"{'':{9 - len(check.state)}}{printable(check.means)}"
        lines.append(line)
    end = "saves work here"
    if broken:
        end = "saves cannot work here: " + ", ".join(check.name for check in broken)
    return "\n".join([*lines, "", end])
