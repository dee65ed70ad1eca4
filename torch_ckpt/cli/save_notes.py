"""What is said of a save that a log tells of, in words and above a picture."""

from __future__ import annotations

import itertools
import time

from torch_ckpt.cli.output import count, printable
from torch_ckpt.cli.save_log import LoggedSave

_NAMED = 8  # ranks without a line, at the most
_LATE = 0.05  # of the time of a save


def heading(save: LoggedSave) -> str:
    """ "step-100: 4 ranks, 2026-11-25 13:41:50, 1.84 s"."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(save.started))
    ranks = count(save.world_size, "rank")
    return f"{printable(save.path)}: {ranks}, {when}, {save.seconds:.3g} s"


def notes(save: LoggedSave) -> list[str]:
    """What stands out: ranks without a line, errors, and a rank that was late to write."""
    out = []
    if missing := save.world_size - len(save.ranks):
        named = ", ".join(map(str, itertools.islice(save.missing(), _NAMED)))
        more = ", ..." if missing > _NAMED else ""
        out.append(f"no line of {count(missing, 'rank')}: {named}{more}")
    errors: dict[str, list[int]] = {}
    for rank, each in sorted(save.ranks.items()):
        if each.error is not None:
            errors.setdefault(each.error, []).append(rank)
    for error, ranks_of in errors.items():
        who = f"rank {ranks_of[0]}" if len(ranks_of) == 1 else f"{len(ranks_of):,} ranks"
        out.append(f"failed on {who}: {printable(error)}")
    ends = {
        span.begin + span.seconds: rank
        for rank in save.ranks
        for span in save.spans(rank)
        if span.phase == "write"
    }
    first, last = min(ends, default=0.0), max(ends, default=0.0)
    if last - first > _LATE * save.seconds:
        out.append(f"rank {ends[last]} was last to write, {last - first:.3g} s after the first")
    return out
