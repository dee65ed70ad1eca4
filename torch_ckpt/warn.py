"""Warnings of ours: they name the line of the caller's that led to them."""

from __future__ import annotations

import sys
import warnings
from itertools import count

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
