"""A save without collectives: which save this rank's part belongs to.

No rank hears of another, so all that makes their parts one checkpoint is what each knows by itself:
the run, the world size, and the how-manieth save of the run into this directory it is.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from torch_ckpt.dcp.write.layouts import Layout, Layouts
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native.torch_private import store_of

_STORE_KEY = "torch_ckpt/run"

# Saves that this process has begun, by directory and rank. One that failed before its part began
# counts too, or this rank's next part would pass for one of the save before.
_saves: Counter[tuple[str, int]] = Counter()
_mutex = threading.Lock()


@dataclass(frozen=True, slots=True)
class Part:
    """Rank `rank` of `world_size` in save number `sequence` of run `run_id` (32 hex digits) into
    one directory. Parts that agree in the last three make one checkpoint."""

    rank: int
    world_size: int
    run_id: str
    sequence: int

    def request(self) -> dict[str, Any]:
        return asdict(self)


def run_id() -> str:
    """The same on all ranks of a run, another in every other run.

    The launcher's names repeat (torchrun's run id is "none" unless it is told another), so ranks
    that have a process group also agree on a random number through its store: a look-up, not a
    collective. A process without a group, or whose store cannot compare and set, goes by the names.
    """
    parts = [_launch()]
    if dist.is_available() and dist.is_initialized():
        token = _agreed_token()
        if token is not None:
            parts.append(token)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _launch() -> str:
    environment = os.environ
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return f"{run}:{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is not None and port is not None:
        return f"{address}:{port}"
    return "local"


def _agreed_token() -> str | None:
    store = store_of(None)
    try:
        agreed = store.compare_set(_STORE_KEY, "", secrets.token_hex(16))
    except NotImplementedError:
        return None
    return bytes(agreed).decode()


def next_sequence(path: str, rank: int) -> int:
    """How many saves of `rank` into `path` this process has begun before this one."""
    with _mutex:
        _saves[path, rank] += 1
        return _saves[path, rank] - 1


def part_of(
    path: str, rank: int | None, world_size: int | None, sequence: int | None = None
) -> Part:
    """The part of this rank in a new save into `path`; `sequence` where it is counted already.

    `rank` is what DCP says. `world_size` is the default group's if it is None; raises
    InvalidArgumentError where the ranks of that group are not the ones that save.
    """
    own = rank or 0
    if world_size is None:
        world_size = 1
        if dist.is_available() and dist.is_initialized():
            if dist.get_rank() != own:
                raise InvalidArgumentError(
                    f"a save without collectives that is not of the default process group (rank "
                    f"{own} here is rank {dist.get_rank()} there) needs the number of ranks that "
                    "save: HuggingFaceStorageWriter(..., world_size=), or use torch_ckpt.save",
                    file=path,
                    rank=own,
                )
            world_size = dist.get_world_size()
    if sequence is None:
        sequence = next_sequence(path, own)
    return Part(own, world_size, run_id(), sequence)


def check_supported(layouts: Layouts, consolidated: Layout | None) -> None:
    """Raise InvalidArgumentError, saying why, for what cannot be saved without collectives."""
    if layouts.final is not None:
        raise InvalidArgumentError(
            "use_collectives=False needs save_distributed=True: final files of whole tensors are "
            "named and numbered over all ranks, which needs one rank that hears of all others"
        )
    if consolidated is not None:
        raise InvalidArgumentError(
            "use_collectives=False cannot consolidate, since no rank knows when the others are "
            "done: leave enable_consolidation out and call torch_ckpt."
            "consolidate_safetensors_files(path, output, None) after the save"
        )
    if layouts.main.extras is not None:
        raise InvalidArgumentError(
            "use_collectives=False cannot save extras, since no rank saves for all"
        )
