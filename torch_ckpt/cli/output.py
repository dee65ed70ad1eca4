"""What all commands share: reports on stdout, errors as one line on stderr, exit statuses."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from torch_ckpt.cli.progress import progress_bar
from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    ConflictError,
    CorruptError,
    ExhaustedError,
    IncompleteError,
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
)
from torch_ckpt.native.progress import Progress

FAILED, USAGE, INCOMPLETE, DIFFERENT, INTERRUPTED = 1, 2, 3, 4, 130

# Kind of error: its name, the exit status, what to do next.
_KINDS: dict[type[CheckpointError], tuple[str, int, str]] = {
    InvalidArgumentError: ("invalid argument", USAGE, "see --help"),
    IncompleteError: (
        "incomplete",
        INCOMPLETE,
        "check the path, and whether all ranks' files are there",
    ),
    CorruptError: ("corrupt", FAILED, "restore the file from a copy, or use another checkpoint"),
    ConflictError: ("conflict", FAILED, "see whether a save or another job uses the directory"),
    UnsupportedError: ("unsupported", FAILED, "see 'Limits' in docs/guarantees.md"),
    ExhaustedError: ("exhausted", FAILED, "use fewer threads, or free some memory"),
    CancelledError: ("cancelled", INTERRUPTED, "run it again"),
    InternalError: ("internal", FAILED, "this is a bug of torch_ckpt; please report it"),
}
_ERRNO_HINTS = {
    errno.ENOSPC: "free some space; nothing was left behind",
    errno.EDQUOT: "free some of your quota; nothing was left behind",
    errno.EACCES: "check who may read and write there",
    errno.EPERM: "check who may read and write there",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "check the path",
    errno.EROFS: "choose a directory that can be written",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def fields_of(error: BaseException) -> tuple[dict[str, Any], int]:
    """An error as JSON fields (kind, message, file, tensor, rank, next), and the exit status."""
    fields: dict[str, Any] = {
        "kind": "internal",
        "message": str(error),
        "file": None,
        "tensor": None,
        "rank": None,
    }
    status, hint = FAILED, _KINDS[InternalError][2]
    if isinstance(error, CheckpointError):
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), InternalError)
        fields["kind"], status, hint = _KINDS[kind]
        fields.update(message=error.message, file=error.file, tensor=error.tensor, rank=error.rank)
    elif isinstance(error, OSError):
        message = error.strerror or str(error)
        fields.update(kind="io", message=message, file=error.filename)
        hint = _ERRNO_HINTS.get(error.errno or 0, "see the system's log for the disk's state")
    elif isinstance(error, MemoryError):
        fields.update(kind="exhausted", message="out of memory")
        hint = _KINDS[ExhaustedError][2]
    elif isinstance(error, ImportError):
        package = (error.name or "torch_ckpt").partition(".")[0]
        hint = "reinstall torch_ckpt" if package == "torch_ckpt" else f"pip install {package}"
        fields["kind"] = "not installed"
    fields["next"] = hint
    return fields, status


def error_line(fields: dict[str, Any]) -> str:
    """ "kind: rank 1: file: tensor 'x': message (next step)"."""
    parts = [fields["kind"]]
    if fields["rank"] is not None:
        parts.append(f"rank {fields['rank']}")
    if fields["file"]:
        parts.append(str(fields["file"]))
    if fields["tensor"]:
        parts.append(f"tensor '{fields['tensor']}'")
    line = ": ".join([*parts, fields["message"]])
    return printable(f"{line} ({fields['next']})")


def printable(text: str) -> str:
    """`text` on one line and without a terminal's commands, whatever names it holds."""
    return "".join(c if c.isprintable() else "?" for c in text)


class Output:
    """Where the report of a command goes. `silent` on all ranks but the first."""

    def __init__(self, *, as_json: bool, quiet: bool, silent: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.silent = silent

    def report(self, fields: dict[str, Any], text: Callable[[], str]) -> None:
        """The result: `fields` with --json, else `text()` unless --quiet, in colour on a terminal
        only, and not with NO_COLOR."""
        if self.silent:
            return
        if self.as_json:
            click.echo(json.dumps(fields))
        elif not self.quiet:
            click.echo(text(), color=False if os.environ.get("NO_COLOR") else None)

    def error(self, fields: dict[str, Any]) -> None:
        """An error, given by `fields_of`, as a line on stderr."""
        if not self.silent:
            click.echo(f"torch-ckpt: {error_line(fields)}", err=True)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Progress | None]:
        """A bar on stderr while the block runs, where somebody would see one."""
        if self.silent or self.quiet:
            yield None
            return
        with progress_bar(label) as progress:
            yield progress

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns an error of the block into one line on stderr and the exit status."""
        try:
            yield
        except (CheckpointError, OSError, MemoryError, ImportError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of our stdout has left; click ends quietly
            fields, status = fields_of(error)
            if not self.silent:
                if self.as_json:
                    click.echo(json.dumps({"error": fields}))
                self.error(fields)
            raise SystemExit(status) from None
        except KeyboardInterrupt:
            click.echo("torch-ckpt: interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None


def with_output(command: _Command) -> Callable[..., None]:
    """Adds --json and --quiet, and calls the command with `output=` under its error handling."""

    @click.option("--json", "as_json", is_flag=True, help="Report as one JSON object.")
    @click.option("-q", "--quiet", is_flag=True, help="No report and no progress, only errors.")
    @functools.wraps(command)
    def wrapped(*, as_json: bool, quiet: bool, **arguments: Any) -> None:
        silent = world_size() > 1 and os.environ.get("RANK", "0") != "0"
        output = Output(as_json=as_json, quiet=quiet, silent=silent)
        with output.errors():
            command(output=output, **arguments)

    return wrapped


def world_size() -> int:
    """Processes that torchrun has started for this command; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
