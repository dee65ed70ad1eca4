"""Which leaves of a checkpoint are meant, by patterns of their names. Nothing here needs torch."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Sequence

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.native.opened import OpenedCheckpoint

logger = logging.getLogger(__name__)

Patterns = str | Sequence[str] | None

# What optimizers of torch call the state of a parameter that is as large as that.
_MOMENTS = (".exp_avg", ".exp_avg_sq", ".max_exp_avg_sq", ".momentum_buffer", ".exp_inf")


def left_out(names: Iterable[str], include: Patterns, exclude: Patterns) -> list[str]:
    """Those of `names` that none of the patterns `include` matches, where there are such, and those
    that one of `exclude` does. Patterns are as in a shell, and * stands for dots too.

    Raises InvalidArgumentError for what is no pattern, and where `include` matches nothing.
    """
    wanted, unwanted = _matcher("include", include), _matcher("exclude", exclude)
    if wanted is None and unwanted is None:
        return []
    names = list(names)
    included = {name for name in names if wanted is None or wanted.match(name)}
    if not included:
        raise InvalidArgumentError(f"include={include!r} matches no name in the checkpoint")
    return [
        name
        for name in names
        if name not in included or (unwanted is not None and unwanted.match(name))
    ]


def left_out_of(opened: OpenedCheckpoint, include: Patterns, exclude: Patterns) -> list[str]:
    """`left_out` of the leaves of a checkpoint."""
    if include is None and exclude is None:
        return []
    names = (name for name in opened.listing().names if name != core.STRUCTURE)
    return left_out(names, include, exclude)


def warn_of_moments(path: str, names: Iterable[str], advice: str) -> None:
    """Log a warning where the state of an optimizer is among the `names` that go into files for
    Hugging Face. `advice` says what to do about it."""
    found = [name for name in names if name.endswith(_MOMENTS)]
    if found:
        logger.warning(
            "%s: %d tensors of an optimizer go into the export, as %s; %s",
            path,
            len(found),
            found[0],
            advice,
        )


def _matcher(argument: str, patterns: Patterns) -> re.Pattern[str] | None:
    if patterns is None:
        return None
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        return None
    if not all(isinstance(pattern, str) for pattern in listed):
        raise InvalidArgumentError(f"{argument} is patterns of names; it was {patterns!r}")
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in listed))
