"""What directories that are not ours cannot prove."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_NAMED = 5  # tensors in the warning


def warn_of_notes(path: str, notes: list[str]) -> None:
    """Log a warning of what is wrong with the checkpoint at `path`, and no error."""
    for note in notes:
        logger.warning("%s: %s", path, note)


def warn_of_hulls(path: str, names: list[str]) -> None:
    """Log a warning that names tensors whose global shape no file of `path` says.

    Stock's shards leave it out. It is taken from the shards that are there, so that a hole is seen
    and a missing last shard is not.
    """
    if not names:
        return
    named = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        named += f" and {len(names) - _NAMED} more"
    logger.warning(
        "%s: no file says the whole shape of %s; it is taken from the shards that are there, so a "
        "missing last shard would not be seen",
        path,
        named,
    )
