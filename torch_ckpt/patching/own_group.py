"""The process group of saves in the background, by programs that call stock."""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch.distributed as dist

from torch_ckpt.native.torch_private import timeout_of
from torch_ckpt.ranks import TIMEOUT_S, rank_and_size

# By the default group, of which there is another one after each init_process_group.
_groups: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_group() -> dist.ProcessGroup | None:
    """All ranks, on connections that nobody else uses. None where there is one rank, or no Gloo. A
    collective call, the first time."""
    if rank_and_size()[1] == 1 or not dist.is_gloo_available():
        return None
    default: Any = dist.group.WORLD
    group = _groups.get(default)
    if group is None:
        made = dist.new_group(
            backend="gloo",
            timeout=datetime.timedelta(seconds=max(TIMEOUT_S, timeout_of(default))),
            # Not by how many groups there were: a rank may have failed before it came here.
            use_local_synchronization=True,
            group_desc="torch_ckpt: saves in the background",
        )
        group = _groups[default] = made
    return group
