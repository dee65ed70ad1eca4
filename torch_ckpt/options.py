"""Arguments as people write them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Collection

from torch_ckpt.errors import InvalidArgumentError


def integer(value: object) -> int | None:
    """The int that `value` is, as integers of numpy are too; None for a bool, and for what is no
    integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def parse_bytes(size: int | str, argument: str) -> int:
    """Bytes of 5, "5", "1.5 GB" (10^9) or "2GiB" (2^30). Raises InvalidArgumentError, naming
    `argument`."""
    number_of_bytes = integer(size)
    if number_of_bytes is not None and number_of_bytes > 0:
        return number_of_bytes
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(size))
    value = 0
    if match is not None and isinstance(size, str):
        number, prefix, binary = match.groups()
        power = " KMGT".index(prefix) if prefix else 0
        value = int(float(number) * (1024 if binary else 1000) ** power)
    if value <= 0:
        raise InvalidArgumentError(
            f'{argument} is a number of bytes, or text as "2GiB"; it was {size!r}'
        )
    return value


# pathlib makes one slash of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def local_path(path: str | os.PathLike[str]) -> str:
    """`path`, absolute. Raises InvalidArgumentError for a URL, which would be a directory "s3:"
    here, and for an empty path, which nobody means to be the current directory."""
    text = os.fsdecode(path)
    if not text:
        raise InvalidArgumentError("the path is empty; the current directory is '.'")
    if _URL.match(text):
        raise InvalidArgumentError(
            f"{text} is a URL: checkpoints are saved to directories and loaded from them. Mount it "
            "or copy the checkpoint"
        )
    return os.path.abspath(text)


def check_choice(argument: str, value: object, choices: Collection[str]) -> None:
    """Raise InvalidArgumentError where `value` is none of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(f"{argument}={value!r} is none of {tuple(choices)}")
