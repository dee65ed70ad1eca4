"""Errors: one class per kind of failure; a failed system call is an OSError. And warnings.

Every error names what it can: file, tensor (its fqn) and rank. All of them survive pickling, since
DCP sends them between ranks and processes.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from itertools import count
from typing import Any, NoReturn


class CheckpointError(Exception):
    """Base of everything that torch_ckpt raises on purpose, except OSError.

    Attributes: `message` (without the names), `file`, `tensor` and `rank` (None where unknown).
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file or None
        self.tensor = tensor or None
        self.rank = rank

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        where += f"{self.file}: " if self.file else ""
        where += f"tensor '{self.tensor}': " if self.tensor else ""
        return where + self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class InvalidArgumentError(CheckpointError, ValueError):
    """The caller asked for something that makes no sense."""


class CorruptError(CheckpointError):
    """Bytes on disk break the format, or do not match their digest."""


class IncompleteError(CheckpointError):
    """A checkpoint, a file, a tensor or a part of one is missing."""


class MissingKeyError(IncompleteError, RuntimeError):
    """The target of a load has a leaf that the checkpoint has not. Stock raises RuntimeError."""


class ConflictError(CheckpointError):
    """Overlapping shards, a lost race, or a directory that is being replaced."""


class UnsupportedError(CheckpointError):
    """Legal, but not something that this build or file system can do."""


class CancelledError(CheckpointError):
    """The job was cancelled."""


class ExhaustedError(CheckpointError):
    """A memory budget or another limit was hit."""


class InternalError(CheckpointError):
    """A bug in torch_ckpt. Please report it."""


_KINDS: dict[str, type[CheckpointError]] = {
    "invalid_argument": InvalidArgumentError,
    "corrupt": CorruptError,
    "incomplete": IncompleteError,
    "conflict": ConflictError,
    "unsupported": UnsupportedError,
    "cancelled": CancelledError,
    "exhausted": ExhaustedError,
    "internal": InternalError,
}


def _rebuild(kind: type[CheckpointError], args: Any, state: dict[str, Any]) -> CheckpointError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def error_from(fields: dict[str, Any]) -> CheckpointError | OSError:
    """The exception for an error of the core: {"kind", "message", "errno", "file", "tensor"}."""
    if fields["kind"] == "io":
        message = fields["message"]
        if fields["tensor"]:
            message = f"tensor '{fields['tensor']}': {message}"
        return OSError(fields["errno"], message, fields["file"] or None)
    kind = _KINDS.get(fields["kind"], InternalError)
    return kind(fields["message"], file=fields["file"], tensor=fields["tensor"])


def with_rank(error: BaseException, rank: int) -> BaseException:
    """The same error, saying on which rank it happened."""
    if isinstance(error, CheckpointError):
        if error.rank is None:
            error.rank = rank
        return error
    if isinstance(error, OSError) and error.errno is not None and not hasattr(error, "rank"):
        named = OSError(error.errno, f"rank {rank}: {error.strerror}", error.filename)
        named.rank = rank  # type: ignore[attr-defined]  # it pickles along
        return named
    return error


def raise_with_rank(error: BaseException, rank: int) -> NoReturn:
    """Raise `error`, which is being handled, as `with_rank` makes it."""
    named = with_rank(error, rank)
    try:
        if named is error:
            raise
        raise named from error
    finally:
        del error, named  # or they would find themselves in this frame


def forget_frames(error: BaseException) -> None:
    """Let go what the frames hold in which `error` and its causes were raised, but for those that
    run: somebody keeps the error, and with it a state as large as the memory. Lines stay."""
    seen: list[BaseException | None] = [None]
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and not any(each is known for known in seen):
            seen.append(each)
            traceback.clear_frames(each.__traceback__)
            todo += [each.__cause__, each.__context__]


# What calls us, or is called by us, on behalf of somebody: stock's dcp.load, decorators of torch.
_BETWEEN = ("torch_ckpt", "torch", "contextlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, as of the innermost frame that is neither ours nor torch's; of the outermost
    one where all are, as on a thread. Python shows equal texts once for each such line."""
    for level in count(1):
        try:
            frame = sys._getframe(level)
        except ValueError:  # no frame is left
            level -= 1
            break
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            break
    warnings.warn(message, category, stacklevel=level + 1)
